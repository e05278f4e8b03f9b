// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/nstest"
)

// A group counts the CPU time of a process's children, including ended ones, and is removed by Close.
func TestGroup(t *testing.T) {
	e := newEnv(t)
	g, err := e.Group("work")
	if err != nil {
		t.Fatal(err)
	}
	p, err := e.Start(Command{Path: "sh", Args: []string{"-c", `sleep 1000 & while :; do (i=0; while [ $i -lt 10000 ]; do i=$((i+1)); done); done`}})
	if err != nil {
		t.Fatal(err)
	}
	nstest.Until(t, "it has a child", func() bool { return len(Family(p.PID)) >= 2 })
	if err := g.Claim(p.PID); err != nil {
		t.Fatal(err)
	}
	if pids, err := g.pids(); err != nil || len(pids) < 2 || !slices.Contains(pids, p.PID) {
		t.Errorf("it holds %v, %v", pids, err)
	}
	if !leftover(e, "cgroup "+g.dir) {
		t.Errorf("the cgroup is not counted: %v", e.Leftovers())
	}
	nstest.Eventually(t, func() error {
		used, err := g.CPU()
		if err == nil && used <= 100*time.Millisecond {
			err = fmt.Errorf("working children used %s", used)
		}
		return err
	})
	e.Close()
	if left := e.Leftovers(); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// A zombie child does not keep its parent out of a group.
func TestGroupWithDeadChild(t *testing.T) {
	e := newEnv(t)
	g, err := e.Group("dead")
	if err != nil {
		t.Fatal(err)
	}
	p, err := e.Start(Command{Path: "sh", Args: []string{"-c", `true & exec sleep 1000`}}) // waits for no child
	if err != nil {
		t.Fatal(err)
	}
	dead := func() bool {
		for _, child := range Family(p.PID) {
			if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", child)); err == nil && bytes.Contains(b, []byte(") Z ")) {
				return true
			}
		}
		return false
	}
	nstest.Eventually(t, func() error {
		if !dead() {
			return fmt.Errorf("no dead child in %v", Family(p.PID))
		}
		return nil
	})
	if err := g.Claim(p.PID); err != nil {
		t.Fatal(err)
	}
	if pids, err := g.pids(); err != nil || !slices.Contains(pids, p.PID) {
		t.Errorf("it holds %v, %v", pids, err)
	}
}

func TestParseUsage(t *testing.T) {
	got, err := parseUsage([]byte("usage_usec 1234567\nuser_usec 1\nsystem_usec 2\n"))
	if err != nil || got != 1234567*time.Microsecond {
		t.Errorf("%v, %v", got, err)
	}
	for _, bad := range []string{"", "user_usec 1\n", "usage_usec x\n"} {
		if got, err := parseUsage([]byte(bad)); err == nil {
			t.Errorf("%q: %v", bad, got)
		}
	}
}
