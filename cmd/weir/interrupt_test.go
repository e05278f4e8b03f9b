// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/nstest"
	"golang.org/x/sys/unix"
)

// promisedReaction bounds how long a change takes to end, or to report its rollback: the promised 1 s, doubled for a
// busy machine.
const promisedReaction = 2 * time.Second

// termed sends TERM to a change and checks its end within promisedReaction, with its report.
func (e *ending) termed(says ...string) {
	e.t.Helper()
	began := time.Now()
	e.term()
	if took := time.Since(began); took > promisedReaction {
		e.t.Errorf("it took %s to end", took)
	}
	for _, want := range says {
		if !strings.Contains(e.said.String(), want) {
			e.t.Errorf("it said %q, want %q", e.said, want)
		}
	}
	if text := e.said.String(); strings.Contains(text, "context canceled") {
		e.t.Errorf("it said %q", text)
	}
}

// manyServices writes a file with n services.
func manyServices(t *testing.T, n int) string {
	t.Helper()
	b := []byte("services:\n")
	for i := range n {
		b = fmt.Appendf(b, "  s%d: {listen: [udp4 127.1.%d.%d:5000], steer: {slots: 1}}\n", i, i/250, i%250+1)
	}
	return written(t, "many.yaml", b)
}

// manyBindings writes a file with n bindings of a service.
func manyBindings(t *testing.T, n int) string {
	t.Helper()
	b := []byte(`{"bindings":[`)
	for i := range n {
		if i > 0 {
			b = append(b, ',')
		}
		b = fmt.Appendf(b, `{"label":"www","protocol":"udp","prefix":"32.%d.%d.%d/32","port":53}`, i>>16, i>>8&255, i&255)
	}
	return written(t, "many.json", append(b, "]}"...))
}

func written(t *testing.T, name string, text []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// A change stuck at a step without a rollback ends within 1 s, and reports how to finish it.
func TestStuckChangesEndWithinASecond(t *testing.T) {
	listen(t)
	apply := func(s session) { s.run(0, ".*", "apply", "-f", configFile(t, ""), "--allow-outage") }
	bindings := manyBindings(t, 10)
	for _, c := range []struct {
		step   string
		before func(s session)
		args   []string
		remedy string
		after  func(s session)
	}{
		{"remove:unpinned", apply, []string{"remove"}, "run weir remove again to finish it", func(s session) {
			s.run(0, "", "remove")
			s.run(0, "no services.*", "status")
		}},
		{"publish:staged", apply, []string{"bypass", "--all"}, "run the command again to finish it", func(s session) {
			s.run(0, ".*", "bypass", "--all")
			s.run(0, ".*BYPASSED.*", "status")
		}},
		{"steer:named all", func(session) {}, []string{"bind", "load", bindings}, "run the command again to finish it", func(s session) {
			s.run(0, ".*10 added, 0 removed, 0 moved, 0 unchanged\n", "bind", "load", bindings)
		}},
		{"steer:named all", func(session) {}, []string{"bind", "replace", bindings}, "run the command again to finish it", func(s session) {
			s.run(0, ".*10 added, 0 removed, 0 moved, 0 unchanged\n", "bind", "replace", bindings)
		}},
		{"publish:staged", func(s session) {
			apply(s)
			s.run(0, ".*", "apply", "-f", configFile(t, ", seed: 7"), "--confirm", "1h")
		}, []string{"rollback"}, "run weir rollback again, or let a running weir serve continue", func(s session) {
			// The process left behind by apply continues with the change at once.
			nstest.Eventually(t, func() error {
				if !strings.Contains(s.run(0, ".*", "status"), "rolled back at") {
					return errors.New("nobody takes the change back")
				}
				return nil
			})
		}},
	} {
		t.Run(strings.Join(c.args[:min(2, len(c.args))], " "), func(t *testing.T) {
			s := session{t, root(t)}
			c.before(s)
			stuckAtStep(t, s.root, c.step, c.args...).termed("weir: half done: ", c.remedy)
			c.after(s)
		})
	}
}

// A long change interrupted midway ends within 1 s and reports the outcome.
func TestLongChangesEndWithinASecond(t *testing.T) {
	const services = 200
	dir := root(t)
	s := session{t, dir}
	many := manyServices(t, services)
	during(t, dir, "publish:staged", "apply", "-f", many).termed("weir: interrupted: rolled back: everything is as before")
	s.run(0, "no services.*", "status")
	s.run(0, ".*", "apply", "-f", many)
	during(t, dir, "publish:staged", "bypass", "--all").termed("weir: half done: ", "repeat the command to finish")
	s.run(0, ".*", "bypass", "--all")
	during(t, dir, "remove:unpinned", "remove").termed("weir: half done: run weir remove again to finish it")
	s.run(0, "", "remove")
	s.run(0, "no services.*", "status")

	bindings := manyBindings(t, 100_000)
	c := command("--root", dir, "bind", "replace", "-")
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	e := begin(t, c)
	e.blocked(unix.SYS_READ)
	e.termed("weir: interrupted: nothing was changed")
	during(t, dir, "steer:named all", "bind", "replace", "--lines", "0", bindings).termed() // it may have finished by then
	s.run(0, ".*(100000 added, 0 removed, 0 moved, 0|0 added, 0 removed, 0 moved, 100000) unchanged\n", "bind", "replace", "--lines", "0", bindings)
}

// A command interrupted while it waits for the lock has changed nothing, and reports so.
func TestWaitingChangesSayThatNothingWasChanged(t *testing.T) {
	dir := root(t)
	holder := stuckAtStep(t, dir, "publish:staged", "apply", "-f", manyServices(t, 1))
	for _, args := range [][]string{{"apply", "-f", manyServices(t, 1)}, {"remove"}, {"rollback"}, {"bypass", "--all"}, {"bind", "replace", manyBindings(t, 1)}} {
		e := begin(t, command(append([]string{"--root", dir}, args...)...))
		e.said.await(t, "waiting for the lock")
		e.termed("weir: interrupted: nothing was changed: ", " holds the lock on ")
	}
	holder.term()
	if !strings.Contains(holder.said.String(), "weir: half done: ") {
		t.Errorf("the one that had it said %q", holder.said)
	}
}
