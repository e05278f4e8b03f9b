// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/reroute/bfd/engine/bpf"
)

// An engine with its BFD removed and recreated by another leaves the new one alone.
func TestReplaced(t *testing.T) {
	s := newSide(t)
	s.put(s.session(1, "10.9.0.1", "10.9.0.2"))
	old := s.e
	again := func() *Engine {
		l, err := s.root.Lock(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer l.Unlock()
		if err := RemoveScope(l, netnsScope(s.here)); err != nil {
			t.Fatal(err)
		}
		if err := old.current(); !errors.Is(err, errReplaced) {
			t.Errorf("removed: %v", err)
		}
		e, err := OpenWith(t.Context(), l, s.here, tick)
		if err != nil {
			t.Fatal(err)
		}
		return e
	}
	e := again()
	defer e.Close()
	if err := e.Put(t.Context(), s.session(2, "fd09::1", "fd09::2")); err != nil {
		t.Fatal(err)
	}
	if err := old.Recover(t.Context()); !errors.Is(err, errReplaced) {
		t.Errorf("made anew: %v", err)
	}
	if err := e.Recover(t.Context()); err != nil {
		t.Error(err)
	}
	ended := make(chan struct{})
	go func() { old.Run(t.Context(), func(err error) { t.Error(err) }); close(ended) }()
	select {
	case <-ended:
	case <-time.After(30 * time.Second):
		t.Error("it looks after what is another's")
	}
	if _, there, err := e.Status(0x77000002); err != nil || !there {
		t.Errorf("%t, %v", there, err)
	}
}

// The programs know the actual tick, even if a process with a longer one attaches missing programs.
func TestTickIsTheLoops(t *testing.T) {
	s := newSide(t)
	ticks := func() time.Duration {
		t.Helper()
		var c bpf.BfdBfdClockwork
		if err := s.e.tables.clock.Lookup(uint32(0), &c); err != nil {
			t.Fatal(err)
		}
		return time.Duration(c.Tick) * time.Microsecond
	}
	l, err := s.root.Lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	other, err := OpenWith(t.Context(), l, s.here, tick/2)
	l.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if got := ticks(); got != tick/2 {
		t.Errorf("asked for %v: %v", tick/2, got)
	}
	if err := s.e.Recover(t.Context()); err != nil || ticks() != tick/2 {
		t.Errorf("after another, who asked for %v: %v, %v", tick, ticks(), err)
	}
}
