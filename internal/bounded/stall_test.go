// SPDX-License-Identifier: Apache-2.0

package bounded_test

import (
	"bufio"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/bounded"
	"github.com/weir-project/weir/internal/nstest"
)

func TestMain(m *testing.M) {
	nstest.Play(map[string]nstest.Role{"ask": ask, "address": playAddress})
	os.Exit(m.Run())
}

// ask makes a call that comes back with a line of its input.
func ask([]string) error {
	fmt.Println("asking")
	line, err := bounded.Do("a", func() (string, error) { return bufio.NewReader(os.Stdin).ReadString('\n') }, nil)
	fmt.Println(strings.TrimSpace(line), err)
	return nil
}

// A process that stood still for longer than a call may take does not blame the call.
func TestStandstill(t *testing.T) {
	p := nstest.Start(t, nstest.Child("ask"))
	p.Expect("asking")
	p.Signal(syscall.SIGSTOP)
	time.Sleep(1500 * time.Millisecond) // longer than a call may take
	p.Signal(syscall.SIGCONT)
	time.Sleep(100 * time.Millisecond) // its timer goes off
	p.Tell("answer")
	p.Expect("answer <nil>")
}
