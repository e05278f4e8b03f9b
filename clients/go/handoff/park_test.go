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

// number is that of the only session.
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

// at waits until the only session is with a member.
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

// A session waits between two members while its stream goes on, and then is the
// other's, or back with the first: as who directs says, when that has gone, and when it
// does not say anything.
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
		// Nobody has it, and it has waited for long enough to be missed.
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
	release(d, "a", wire.ErrNoSession) // it does not wait any more
	park(d)
	release(d, "", nil)
	w.at("b")
	park(d)
	d.Close()
	w.at("b")
	d = w.direct()
	park(d)
	w.at("b") // by itself, after 3 s
	moves := w.sessions("session")[0].Moves
	if moves != 1 {
		t.Errorf("%d moves, want the one", moves)
	}
	// Its member dies while it waits, and is not missed.
	park(d)
	b.Kill()
	release(d, "a", nil)
	w.at("a")
	// A session that waits for a member may be given to another one.
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

// Who hangs keeps its sessions; who does not move them on request does, too.
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
		t.Errorf("of a member that is stopped: %v, %v, %v", parked, stay, err)
	}
	m.Signal(syscall.SIGCONT)
	w.at("a") // what it answers now is too late
	c.finish()
	if n := w.counts(); n.Transfers != 0 {
		t.Errorf("%+v", n)
	}
}
