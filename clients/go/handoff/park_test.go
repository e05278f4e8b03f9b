// SPDX-License-Identifier: Apache-2.0

package handoff_test

import (
	"errors"
	"fmt"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/feature/handoff/keeper"
	"github.com/weir-project/weir/feature/handoff/wire"
	"github.com/weir-project/weir/internal/nstest"
)

// number returns the number of the only session.
func (w *world) number() uint64 {
	w.t.Helper()
	s := w.sessions("session")
	if len(s) != 1 {
		w.t.Fatalf("%d sessions, want 1", len(s))
	}
	id, err := strconv.ParseUint(s[0].ID, 10, 64)
	if err != nil {
		w.t.Fatal(err)
	}
	return id
}

// at waits until a member has the only session.
func (w *world) at(name string) {
	w.t.Helper()
	nstest.Until(w.t, "the session is with member "+name, func() bool {
		s := w.sessions("session")
		return len(s) == 1 && s[0].Member == name && s[0].PID != 0
	})
}

func (w *world) direct() *handoff.Director {
	w.t.Helper()
	d, err := handoff.Direct(w.t.Context(), w.socket)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { d.Close() })
	return d
}

// TestPark suspends a session between two members while its stream continues. Then it is with the
// other, or back with the first: by the director's order, after the director's exit, and after a
// timeout.
func TestPark(t *testing.T) {
	w := newWorld(t, keeper.Options{})
	a := w.member("a", 0)
	b := w.memberAt(freeAddress(t), "b", 0)
	c := w.client()
	c.run()
	nstest.Until(t, "the session is kept", func() bool { return len(w.sessions("session")) == 1 })
	id := w.number()
	park := func(d *handoff.Director) {
		t.Helper()
		parked, stay, err := d.Suspend(t.Context(), patience, id, 4711)
		if err != nil || len(parked) != 1 || parked[0] != id || !errors.Is(stay[4711], wire.ErrNoSession) {
			t.Fatalf("parked %v, stay %v, %v", parked, stay, err)
		}
		// Nobody has it for long enough to notice.
		nstest.Steadily(t, 20*time.Millisecond, func() error {
			if s := w.sessions("session"); len(s) != 1 || s[0].PID != 0 {
				return fmt.Errorf("%+v", s)
			}
			return nil
		})
	}
	release := func(d *handoff.Director, to string, want error) {
		t.Helper()
		back, err := d.Release(t.Context(), map[uint64]string{id: to})
		if err != nil || !errors.Is(back[id], want) {
			t.Fatalf("released to %q: %v, %v; want %v", to, back, err, want)
		}
	}
	d := w.direct()
	park(d)
	release(d, "b", nil)
	w.at("b")
	park(d)
	if _, stay, err := w.direct().Suspend(t.Context(), patience, id); err != nil || !errors.Is(stay[id], wire.ErrOwned) {
		t.Errorf("parked twice: %v, %v", stay, err)
	}
	release(d, "nobody", wire.ErrNoPeer)
	w.at("b")
	release(d, "a", wire.ErrNoSession) // it no longer waits
	park(d)
	release(d, "", nil)
	w.at("b")
	park(d)
	d.Close()
	w.at("b")
	d = w.direct()
	park(d)
	w.at("b") // after 3 s without an order
	moves := w.sessions("session")[0].Moves
	if moves != 1 {
		t.Errorf("%d moves, want 1", moves)
	}
	// Its member dies meanwhile and is not needed.
	park(d)
	b.Kill()
	release(d, "a", nil)
	w.at("a")
	// A session waiting for a member may go to another one.
	w.memberAt(freeAddress(t), "b", 0)
	a.Kill()
	nstest.Until(t, "the session waits", func() bool { s := w.sessions("session"); return len(s) == 1 && s[0].PID == 0 })
	park(d)
	release(d, "b", nil)
	w.at("b")
	c.finish()
	if n := w.counts(); n.Gaps+n.Expired+n.Closed != 0 {
		t.Errorf("%+v", n)
	}
}

// TestParkStays checks that a hanging member keeps its sessions, and so does a member without moves
// on request.
func TestParkStays(t *testing.T) {
	w := newWorld(t, keeper.Options{})
	m := w.member("a", 0)
	c := w.client()
	c.run()
	nstest.Until(t, "the session is kept", func() bool { return len(w.sessions("session")) == 1 })
	id, d := w.number(), w.direct()
	stop(t, m)
	parked, stay, err := d.Suspend(t.Context(), 100*time.Millisecond, id)
	if err != nil || len(parked) != 0 || !errors.Is(stay[id], handoff.ErrSlow) {
		t.Errorf("of a stopped member: %v, %v, %v", parked, stay, err)
	}
	m.Signal(syscall.SIGCONT)
	w.at("a") // its answer is too late now
	c.finish()
	if n := w.counts(); n.Transfers != 0 {
		t.Errorf("%+v", n)
	}
}
