// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/feature/reroute/links"
	"github.com/weir-project/weir/feature/reroute/liveness/bpf"
	"github.com/weir-project/weir/internal/nstest"
)

const flagClosing = 2 // LIVENESS_CLOSING

// The end of a session does not prove its link. A link found down stays down, even if it fails during the farewell. A
// working link does not go down, however long the interval of either end.
func TestFarewellWhileDown(t *testing.T) {
	const tick = 2500 * time.Microsecond
	for _, c := range []struct {
		name         string
		interval     time.Duration // of the peer's probes
		broken       time.Duration // answers are missing for this time before the first farewell; 0: none
		whileClosing bool          // answers are missing during the farewell too
		want         uint32
	}{
		{"long before", 10 * time.Millisecond, 200 * time.Millisecond, true, phaseDown},
		{"just before", 10 * time.Millisecond, 15 * time.Millisecond, true, phaseDown},
		{"before the farewell of a peer that probes seldom", 50 * time.Millisecond, 200 * time.Millisecond, true, phaseDown},
		{"during it", 10 * time.Millisecond, 0, true, phaseDown},
		{"repaired, and not yet for long", 10 * time.Millisecond, 200 * time.Millisecond, false, phaseDown},
		{"never", 10 * time.Millisecond, 0, false, 0},
		{"never, of a peer that probes seldom", 50 * time.Millisecond, 0, false, 0},
		{"never, of a peer that probes often", 3 * time.Millisecond, 0, false, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t)
			b.s.StableFor, b.s.StableMax = time.Second, time.Second
			b.put()
			at, probed, seq := time.Duration(0), time.Duration(0), uint32(0)
			run := func(long time.Duration, answers, probes bool, flags uint8) *bpf.LivenessLivenessState {
				for end := at + long; at < end; at += tick {
					b.at(at)
					b.run(bpf.LivenessProgLivenessTick, beat())
					if s := b.state(); answers && s.Seq != s.Answered {
						b.run(bpf.LivenessProgLivenessReturn, b.sign(b.answer(s.Seq)))
					}
					if probes && at-probed >= c.interval {
						probed = at
						seq++
						f := b.frame(seq, at)
						f.Tlv.Interval, f.Tlv.Flags = network32(uint32(c.interval/time.Microsecond)), flags
						b.run(bpf.LivenessProgLivenessEndRun, b.sign(f))
					}
				}
				return b.state()
			}
			if s := run(2*time.Second, true, true, 0); s.Sender.Phase != 1 || s.Peer.Phase != 1 {
				t.Fatalf("it did not come up: %+v, %+v", s.Sender, s.Peer)
			}
			run(c.broken, false, true, 0)
			run(max(200*time.Millisecond, 4*c.interval), !c.whileClosing, true, flagClosing)
			s := run(2*time.Second, false, false, 0)
			if s.Closed != 0 || s.Sender.Phase != c.want || s.Peer.Phase != 0 {
				t.Errorf("phases %d and %d, want %d and 0; closed at %d", s.Sender.Phase, s.Peer.Phase, c.want, s.Closed)
			}
			var w links.State
			if err := b.maps[pinLinks].Lookup(uint32(0), &w); err != nil || (w.Reasons() != 0) != (c.want == phaseDown) {
				t.Errorf("the data path reads %v, %v", w, err)
			}
			if s := run(3*time.Second, true, true, 0); s.Sender.Phase != 1 || s.Peer.Phase != 1 {
				t.Errorf("with the peer back: %+v, %+v", s.Sender, s.Peer)
			}
		})
	}
}

// The same with two kernels: this end's probes are lost, the peer's arrive, and the peer is removed.
func TestRemovedWhileDown(t *testing.T) {
	p := newPair(t)
	a, b := p.sessions(10 * time.Millisecond)
	p.apply(p.w.NameA, a)
	p.apply(p.w.NameB, b)
	p.within(patience, "up", bothUp)
	inside(t, p.w.B, func() error {
		return netlink.RouteDel(&netlink.Route{Dst: &net.IPNet{IP: functionB.AsSlice(), Mask: net.CIDRMask(128, 128)}})
	})
	p.within(patience, "down", func(a, b SessionState) bool { return a.Phase == Down && b.Phase == Down && a.In == Works })
	events := make(chan SessionEvent, 64)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go AllEvents(ctx, p.root, func(e SessionEvent) { events <- e })
	l := p.lock() // without Recover, which would restore the route
	err := remove(l, netnsScope(p.w.B))
	l.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	for late := time.After(patience); ; {
		select {
		case e := <-events:
			if e.Session.Name != "to-b" || !e.Ended || e.ByPeer {
				continue
			}
			if s := p.state().session("to-b"); e.Phase != Down || s.Phase != Down || !s.Kept {
				t.Errorf("after the farewell: %+v, %+v", e, s)
			}
		case <-late:
			t.Fatalf("no farewell: %+v", p.state())
		}
		break
	}
	if w := p.word(p.w.A, nstest.WireDevice); w.Reasons() != links.Probe {
		t.Errorf("the data path reads %v", w)
	}
	p.apply(p.w.NameB, b)
	p.within(patience, "up again", func(a, b SessionState) bool { return bothUp(a, b) && !a.Kept })
	p.words(0)
}

// A session changed while its link is down stays down until an answer arrives.
func TestChangedWhileDown(t *testing.T) {
	p := newPair(t)
	a, b := p.sessions(10 * time.Millisecond)
	p.apply(p.w.NameA, a)
	p.apply(p.w.NameB, b)
	p.within(patience, "up", bothUp)
	cut(t, p.w.A, nstest.WireDevice, true)
	cut(t, p.w.B, nstest.WireDevice, true)
	p.within(patience, "down", func(a, b SessionState) bool { return a.Phase == Down && b.Phase == Down })
	p.words(links.Probe)
	a.KeyFile, b.KeyFile = newKey(t), ""
	p.apply(p.w.NameA, a)
	b.KeyFile = a.KeyFile
	p.apply(p.w.NameB, b)
	p.words(links.Probe)
	if s := p.state().session("to-b"); s.Phase != Down || !s.Kept {
		t.Errorf("with another key: %+v", s)
	}
	cut(t, p.w.A, nstest.WireDevice, false)
	cut(t, p.w.B, nstest.WireDevice, false)
	p.within(patience, "up", bothUp)
	p.words(0)
	cut(t, p.w.A, nstest.WireDevice, true)
	cut(t, p.w.B, nstest.WireDevice, true)
	p.words(links.Probe)
	a.Observe = true
	p.apply(p.w.NameA, a)
	if w := p.word(p.w.A, nstest.WireDevice); w.Reasons() != 0 {
		t.Errorf("a session that observes: %v", w)
	}
}
