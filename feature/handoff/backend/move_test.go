// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/feature/handoff/quarantine"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// TestMove moves a session around four backends, in both directions, under a stream.
func TestMove(t *testing.T) {
	for name, at := range map[string]netip.AddrPort{"IPv4": at4, "IPv6": at6} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, 4, at)
			c := w.dial()
			if err := c.ask("hello"); err != nil {
				t.Fatal(err)
			}
			c.said = make(chan []byte, 1024)
			c.stream(4000, time.Millisecond)
			for i := range 40 {
				w.mustSend(c, 1+(i+1)%4)
			}
			if err := c.stop(); err != nil {
				t.Fatal(err)
			}
			t.Logf("%d bytes verified", c.heard)
			for _, s := range w.servers {
				var st Status
				w.eventually("the source has heard that its session has moved", func() (ok bool) {
					var err error
					st, err = s.agent.Status()
					return err == nil && st.Sending == 0
				})
				t.Logf("%+v", st)
				if st.Out != 10 || st.Returned != 0 || len(st.Rejected) != 0 {
					t.Errorf("server %d: %d moved from here, %d came back, refused %v", s.number, st.Out, st.Returned, st.Rejected)
				}
			}
		})
	}
}

// TestUrgentMove moves a session with urgent bytes, read by its member or not.
func TestUrgentMove(t *testing.T) {
	w := newWorld(t, 2, at4)
	c := w.dial()
	if err := c.ask("hello"); err != nil {
		t.Fatal(err)
	}
	c.said, c.urgent = make(chan []byte, 1024), true
	c.stream(300, time.Millisecond)
	for i := range 20 {
		w.mustMove(c, 2-i%2)
	}
	if err := c.stop(); err != nil {
		t.Fatal(err)
	}
}

// mustMove moves a session, with retries: before Linux 6.9 an unread urgent byte prevents the move.
func (w *world) mustMove(c *client, to int) {
	w.t.Helper()
	w.eventually(fmt.Sprint("the session moves to server ", to), func() bool {
		if w.has(c) == to {
			return true
		}
		_ = w.send(c, to) // it may be under way
		return w.has(c) == to
	})
}

// TestMoveWithFilters moves sessions on a kernel without tcx.
func TestMoveWithFilters(t *testing.T) {
	tcx := kernel.TCXLink.Probe
	t.Cleanup(func() { kernel.TCXLink.Probe = tcx }) // after the agents have ended
	kernel.TCXLink.Probe = func() error { return ebpf.ErrNotSupported }
	w := newWorld(t, 2, at4)
	c := w.dial()
	if err := c.ask("hello"); err != nil {
		t.Fatal(err)
	}
	for i := range 6 {
		w.mustSend(c, 2-i%2)
		if err := c.ask("still there"); err != nil {
			t.Fatal(err)
		}
	}
	for _, s := range w.servers {
		s.stop()
		w.in(s.ns, func() error {
			f := kernel.Clsact{Ifindex: nstest.Ifindex(t, s.ns, "w0"), Name: "weir_quarantine_out", Egress: true, Priority: 3}
			there, err := f.Attached()
			if err != nil || !there {
				t.Errorf("the quarantine is there after its agent: %v, %v", there, err)
			}
			if err := w.removeQuarantines(s); err != nil {
				return err
			}
			if there, err = f.Attached(); there {
				t.Error("the quarantine is there after it was removed")
			}
			return err
		})
	}
	// Read to the end: a client closing with an unread answer resets its session, and the backend reports it.
	if err := c.ask("without quarantines"); err != nil {
		t.Error(err)
	}
}

// removeQuarantines removes the quarantine of the first backend, then all of them.
func (w *world) removeQuarantines(s *server) error {
	l, err := w.root.Lock(w.t.Context())
	if err != nil {
		return err
	}
	defer l.Unlock()
	if s.number == 1 {
		return s.ns.Do(func() error { return removeHere(l) })
	}
	return quarantine.RemoveAll(l)
}

// TestTooLargeStays checks that a session above the keeper's limit stays at its source and continues.
func TestTooLargeStays(t *testing.T) {
	w := newNetwork(t, 2, at4)
	w.servers[1].limit = 1000
	w.run()
	c := w.dial()
	if err := c.ask("hello"); err != nil {
		t.Fatal(err)
	}
	s := w.servers[0].member.Member().Sessions()[0]
	w.eventually("the member has committed what it answered", func() bool { return len(s.State()) == 8 }) // its own commit would replace the test's
	if err := s.Commit(make([]byte, 2000)); err != nil {                                                  // breaks talk, but nothing more is sent
		t.Fatal(err)
	}
	w.ask(c, 2)
	w.eventually("it has come back", func() bool {
		st, err := w.servers[0].agent.Status()
		return err == nil && st.Returned == 1 && st.Sending == 0
	})
	w.mustBeAt(c, 1)
	if st, err := w.servers[1].agent.Status(); err != nil || st.Rejected["arrival"] != 1 {
		t.Errorf("%+v, %v", st, err)
	}
}

// TestNoMemberThere checks that a session stays if the destination has no member. A drain does not choose such a
// backend.
func TestNoMemberThere(t *testing.T) {
	w := newWorld(t, 2, at4)
	c := w.dial()
	if err := c.ask("hello"); err != nil {
		t.Fatal(err)
	}
	here := w.servers[0].agent
	takes := func() string {
		r, err := handoff.Status(t.Context(), w.servers[0].keeper)
		if err != nil || len(r.Services) != 1 {
			t.Fatal(r, err)
		}
		return here.leastLoaded(r.Services[0])
	}
	w.eventually("the other server is taken", func() bool { return takes() == "@s2" })
	w.servers[1].member.Close() // like a stopped daemon
	w.eventually("the other server is not taken", func() bool { return takes() == "" })
	d, err := here.drainStep(t.Context())
	if err != nil || d.Left != 1 || d.Asked != 0 || !strings.Contains(d.Reason, "has a member") {
		t.Errorf("%+v, %v", d, err)
	}
	w.ask(c, 2) // an explicit request
	w.eventually("it has come back", func() bool {
		st, err := here.Status()
		return err == nil && st.Returned == 1 && st.Sending == 0
	})
	w.mustBeAt(c, 1)
	if err := c.ask("and here it goes on"); err != nil {
		t.Error(err)
	}
	if st, err := w.servers[1].agent.Status(); err != nil || st.Rejected["arrival"] != 1 || st.In != 0 {
		t.Errorf("%+v, %v", st, err)
	}
	w.servers[1].serve()
	w.eventually("the other server is taken again", func() bool { return takes() == "@s2" })
	w.mustSend(c, 2)
	if err := c.ask("and there"); err != nil {
		t.Error(err)
	}
}
