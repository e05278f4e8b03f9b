// SPDX-License-Identifier: Apache-2.0

package awake

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/nstest"
	"golang.org/x/sys/unix"
)

// slices is how often the threads of this process have been given a CPU.
func slices(t *testing.T) (n int) {
	t.Helper()
	all, err := filepath.Glob("/proc/self/task/*/schedstat")
	if err != nil || len(all) == 0 {
		t.Fatal(all, err)
	}
	for _, name := range all {
		b, err := os.ReadFile(name)
		if os.IsNotExist(err) {
			continue // a thread has ended
		}
		if f := strings.Fields(string(b)); len(f) == 3 {
			one, _ := strconv.Atoi(f[2])
			n += one
		}
	}
	return n
}

// talker is set in a process that sends a message every millisecond, as they come to a keeper.
const talker = "WEIR_AWAKE_TALKER"

func init() {
	if os.Getenv(talker) == "" {
		return
	}
	ts := unix.NsecToTimespec(int64(time.Millisecond))
	for range 400 {
		_ = unix.Nanosleep(&ts, nil)
		if _, err := os.Stdout.Write([]byte{0}); err != nil {
			break
		}
	}
	os.Exit(0)
}

// talk has another process send messages, and says how often this one was given a CPU meanwhile.
func talk(t *testing.T, each func()) int {
	t.Helper()
	c := exec.Command("/proc/self/exe")
	c.Env = append(os.Environ(), talker+"=1")
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Wait() }()
	b := make([]byte, 1)
	if _, err := out.Read(b); err != nil {
		t.Fatal(err)
	}
	before := slices(t)
	for {
		if n, err := out.Read(b); n == 0 || err != nil {
			return slices(t) - before
		}
		each()
	}
}

// Where many messages come the process is woken less often for them, and where there are none any more all is as it was.
func TestBusy(t *testing.T) {
	Room()
	var best float64 = 2
	for try := 0; try < 5 && best > 0.8; try++ { // others' work on this machine is in it
		plain := talk(t, func() {})
		busy := talk(t, Busy)
		best = min(best, float64(busy)/float64(plain))
		t.Logf("400 messages: a CPU %d times, and %d with Busy", plain, busy)
	}
	if best > 0.8 {
		t.Errorf("woken %.2f times as often with Busy", best)
	}
	nstest.Eventually(t, func() error {
		if monitor.held.Load() {
			return errors.New("the monitor is kept awake for nothing")
		}
		return nil
	})
}

// A moment is kept through, and ends.
func TestForHolds(t *testing.T) {
	Room()
	For(150 * time.Millisecond)
	if !monitor.held.Load() {
		t.Error("it is not held")
	}
	nstest.Eventually(t, func() error {
		if monitor.held.Load() {
			return errors.New("it is held for good")
		}
		return nil
	})
}

func BenchmarkBusy(b *testing.B) {
	for b.Loop() {
		Busy()
	}
}
