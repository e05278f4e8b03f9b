// SPDX-License-Identifier: Apache-2.0

package kerneltest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// DieAt kills this process at a step of its change, like a crash. step is a number counted from 0, or a prefix of the
// step's name. A test's child calls it before the change. It prints the name of the step for [Killed]. "-1" matches no
// step.
func DieAt(step string) { OnStep(dieAt(step)) }

// DieAtKind is like DieAt, for changes with many steps of one kind; see [OnKind].
func DieAtKind(step string) { OnKind(dieAt(step)) }

// OnKind is like OnStep, but skips repeated steps of one kind, the name up to "_". The tests of package kernel visit
// each pin.
func OnKind(hook func(step string)) {
	last := ""
	OnStep(func(step string) {
		kind, _, _ := strings.Cut(step, "_")
		if kind != last {
			hook(step)
		}
		last = kind
	})
}

func dieAt(at string) func(step string) {
	number, err := strconv.Atoi(at)
	named := err != nil
	n := 0
	return func(step string) {
		if named && strings.HasPrefix(step, at) || !named && n == number {
			fmt.Println(step)
			_ = unix.Kill(os.Getpid(), unix.SIGKILL)
			select {}
		}
		n++
	}
}

// Killed runs a child that calls DieAt. It returns the step of the kill, or "" if the child ended by itself. Any other
// end fails the test, except an error containing one of fails: the change then fails as expected, and no step is left.
func Killed(t testing.TB, c *exec.Cmd, fails ...string) (step string) {
	t.Helper()
	out, err := c.CombinedOutput()
	if err == nil {
		return ""
	}
	said := strings.TrimSpace(string(out))
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.Sys().(syscall.WaitStatus).Signal() == unix.SIGKILL {
		return said[strings.LastIndex(said, "\n")+1:]
	}
	for _, f := range fails {
		if strings.Contains(said, f) {
			return ""
		}
	}
	t.Fatalf("%q: %v\n%s", c.Args, err, said)
	return ""
}
