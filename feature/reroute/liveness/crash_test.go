// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/kerneltest"
)

// runApply applies a configuration and dies at a given step; -1: at none.
func runApply(args []string) error {
	var c Config
	if err := json.Unmarshal([]byte(args[2]), &c); err != nil {
		return err
	}
	kerneltest.DieAt(args[1])
	_, err := applyTo(kernel.OpenRoot(args[0]), c)
	return err
}

// runWake continues a process two seconds after it was stopped.
func runWake(args []string) error {
	pid, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	err = nstest.Poll(nstest.Timeout(), func() error { // the process may stop late
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			return err
		}
		if _, rest, _ := strings.Cut(string(b), ") "); !strings.HasPrefix(rest, "T") {
			return fmt.Errorf("process %d does not stop: %s", pid, b)
		}
		return nil
	})
	if err != nil {
		return err
	}
	time.Sleep(2 * time.Second)
	return syscall.Kill(pid, syscall.SIGCONT)
}

func (p *pair) elsewhere(dieAt int, netns string, sessions ...Session) (killed bool) {
	p.t.Helper()
	data, err := json.Marshal(Config{Netns: netns, Sessions: sessions})
	if err != nil {
		p.t.Fatal(err)
	}
	return kerneltest.Killed(p.t, nstest.Child("apply", p.root.Path(), dieAt, string(data))) != ""
}

func (p *pair) appliedElsewhere(netns string, sessions ...Session) {
	p.t.Helper()
	p.elsewhere(-1, netns, sessions...)
}

// A command killed at any step of create, change or remove is completed by the next one.
func TestKilled(t *testing.T) {
	p := newPair(t)
	a, b := p.sessions(10 * time.Millisecond)
	p.apply(p.w.NameB, b)
	changed := a
	changed.ID, changed.Interval = 9, 20*time.Millisecond
	for _, c := range []struct {
		name     string
		from, to []Session
		stride   int // distance between the tested steps: each takes a second or two
	}{
		{"create", nil, []Session{a}, 4},
		{"change", []Session{a}, []Session{changed}, 9},
		{"remove", []Session{a}, nil, 11},
	} {
		t.Run(c.name, func(t *testing.T) {
			for at := 0; ; at += c.stride {
				p.apply(p.w.NameA, c.from...)
				if !p.elsewhere(at, p.w.NameA, c.to...) {
					if at == 0 {
						t.Fatal("it has no steps")
					}
					return
				}
				p.apply(p.w.NameA, a)
				p.within(patience, "up after a kill", bothUp)
				p.apply(p.w.NameA)
				if all, err := p.root.Instances(""); err != nil || len(all) != 1 {
					t.Fatalf("killed at step %d: %v, %v", at, all, err)
				}
			}
		})
	}
}
