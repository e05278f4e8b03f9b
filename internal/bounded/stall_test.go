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

// ask makes a call and returns a line of its input.
func ask([]string) error {
	fmt.Println("asking")
	line, err := bounded.Do("a", func() (string, error) { return bufio.NewReader(os.Stdin).ReadString('\n') }, nil)
	fmt.Println(strings.TrimSpace(line), err)
	return nil
}

// TestStandstill checks that a process stopped for longer than the limit does not blame the call.
func TestStandstill(t *testing.T) {
	p := nstest.Start(t, nstest.Child("ask"))
	p.Expect("asking")
	p.Signal(syscall.SIGSTOP)
	time.Sleep(1500 * time.Millisecond) // longer than the limit of a call
	p.Signal(syscall.SIGCONT)
	time.Sleep(100 * time.Millisecond) // its timer fires
	p.Tell("answer")
	p.Expect("answer <nil>")
}
