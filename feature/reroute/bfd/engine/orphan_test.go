// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"testing"

	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/internal/nstest"
)

// The restart of a daemon puts no dead link back into use. It may be bfdd, with its sessions lost, or the killed
// process running them. The next session on the link takes over the verdict. Without one the link is released.
func TestVerdictOutlivesDaemons(t *testing.T) {
	s := newSide(t)
	open := func() *Engine {
		t.Helper()
		e, err := OpenHanded(t.Context(), s.root, s.here, tick, Handed{Text: []byte(`"one"`)})
		if err != nil {
			t.Fatal(err)
		}
		return e
	}
	far, err := Open(t.Context(), s.root, s.there, tick)
	if err != nil {
		t.Fatal(err)
	}
	defer far.Close()
	back := s.session(2, "10.9.0.2", "10.9.0.1")
	back.Ifindex = nstest.Ifindex(t, s.there, "w0")
	near := s.session(1, "10.9.0.1", "10.9.0.2")
	near.Link, near.Multiplier, back.Multiplier = s.index, 10, 10
	next := uint32(100)
	put := func(e *Engine, x Session) Session {
		t.Helper()
		x.Discriminator, next = next, next+1
		if err := e.Put(t.Context(), x); err != nil {
			t.Fatal(err)
		}
		return x
	}
	state := func(e *Engine, x Session) Status {
		t.Helper()
		st, there, err := e.Status(x.Discriminator)
		if err != nil || !there {
			t.Fatal(there, err)
		}
		return st
	}
	both := func(e *Engine, x Session, what string) {
		t.Helper()
		nstest.Until(s, what, func() bool {
			for _, e := range []*Engine{e, far} {
				if err := e.Recover(t.Context()); err != nil { // Recover also resolves neighbours
					t.Fatal(err)
				}
				e.mu.Lock()
				err := e.resolve()
				e.mu.Unlock()
				if err != nil {
					t.Fatal(err)
				}
			}
			return state(e, x).State == bfd.Up
		})
	}
	judged := func(e *Engine, x Session) { // the programs have judged it and set the link state
		t.Helper()
		sent := state(e, x).Out
		nstest.Until(s, "packets go out", func() bool { return state(e, x).Out > sent+1 })
	}

	e := open()
	other := put(far, back)
	x := put(e, near)
	both(e, x, "both ends are up")
	if s.bad() {
		t.Fatal("the link works, and is not used")
	}
	if err := far.Delete(other.Discriminator); err != nil { // silently, as a cut does
		t.Fatal(err)
	}
	nstest.Until(s, "the link is dead", s.bad)

	if err := e.Lost(x.Discriminator); err != nil { // bfdd was killed
		t.Fatal(err)
	}
	if !s.bad() {
		t.Fatal("the link is used since bfdd has ended")
	}
	x = put(e, near)
	judged(e, x)
	if !s.bad() {
		t.Fatal("the link is used since bfdd has begun anew")
	}

	e.Close() // as SIGKILL does
	e = open()
	if !s.bad() {
		t.Fatal("the link is used since the process has begun anew")
	}
	x = put(e, near)
	judged(e, x)
	if err := e.GiveBack(0); err != nil || !s.bad() {
		t.Fatalf("the link is used since bfdd has handed the session over again: %v", err)
	}

	put(far, back)
	both(e, x, "both ends are up again")
	nstest.Until(s, "the link is used again", func() bool { return !s.bad() })

	if err := far.Delete(next - 1); err != nil {
		t.Fatal(err)
	}
	nstest.Until(s, "the link is dead again", s.bad)
	e.Close()
	e = open()
	defer e.Close()
	if err := e.GiveBack(0); err != nil || s.bad() {
		t.Fatalf("no session judges the link, and it is not used: %v", err)
	}
}
