// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"sync"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/bfd/bfdtest"
	"github.com/weir-project/weir/feature/reroute/frrtest"
	"github.com/weir-project/weir/feature/reroute/links"
	"github.com/weir-project/weir/internal/nstest"
)

// A session shut down by either end gives no verdict of the link (RFC 5882 section 3.2), nor while it comes up again,
// however long this takes. A failed session does.
func TestMaintenance(t *testing.T) {
	const every = 10 * time.Millisecond
	const good, bad = false, true
	type step struct {
		does string
		want bool
	}
	heard := map[string]bfd.State{"admin-down": bfd.AdminDown, "down": bfd.Down, "init": bfd.Init, "up": bfd.Up}
	for name, steps := range map[string][]step{
		"not there yet":              {{"silence", good}, {"down", good}, {"silence", good}, {"admin-down", good}, {"down", good}},
		"a failure":                  {{"down", good}, {"up", good}, {"silence", bad}, {"down", bad}, {"up", good}},
		"it says a failure":          {{"down", good}, {"up", good}, {"down", bad}, {"init", good}},
		"the neighbour's":            {{"down", good}, {"up", good}, {"admin-down", good}, {"silence", good}, {"down", good}, {"up", good}},
		"it comes back slowly":       {{"down", good}, {"up", good}, {"admin-down", good}, {"down", good}, {"silence", good}, {"down", good}, {"init", good}},
		"a failure behind it":        {{"down", good}, {"up", good}, {"admin-down", good}, {"down", good}, {"up", good}, {"silence", bad}},
		"behind a failure":           {{"down", good}, {"up", good}, {"silence", bad}, {"admin-down", good}, {"down", good}, {"silence", good}, {"down", good}, {"up", good}},
		"ours":                       {{"down", good}, {"up", good}, {"shut", good}, {"down", good}, {"begin", good}, {"silence", good}, {"down", good}, {"up", good}, {"silence", bad}},
		"ours, behind a failure":     {{"down", good}, {"up", good}, {"silence", bad}, {"shut", good}, {"begin", good}, {"down", good}, {"silence", good}},
		"both":                       {{"down", good}, {"up", good}, {"admin-down", good}, {"shut", good}, {"begin", good}, {"admin-down", good}, {"down", good}},
		"not up, and changed":        {{"change", good}, {"down", good}, {"change", good}, {"silence", good}},
		"failed, and changed":        {{"down", good}, {"up", good}, {"silence", bad}, {"change", bad}, {"down", bad}},
		"shut again, and up between": {{"down", good}, {"up", good}, {"admin-down", good}, {"down", good}, {"up", good}, {"down", bad}, {"admin-down", good}},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			s := &Session{Config: bfd.Config{Discriminator: 0x01020304, Multiplier: 3, DesiredTx: every, RequiredRx: every},
				Local: local4, Peer: peer4, Ifindex: b.index, Link: b.index, SourcePort: 50000}
			generation := uint32(0)
			put := func() {
				generation++
				if err := b.w.put(0, s, generation); err != nil {
					t.Fatal(err)
				}
			}
			put()
			p := bfdtest.Packet{Multiplier: 3, Mine: 5, Yours: s.Discriminator, DesiredTx: every, RequiredRx: every}
			for i, x := range steps {
				b.now += time.Millisecond
				switch state, packet := heard[x.does]; {
				case packet:
					p.State = state
					b.receive(frame(peer4, local4, bfdtest.HopLimit, p.Append(nil)))
				case x.does == "silence":
					b.now += time.Minute
				default:
					s.Down = x.does == "shut"
					if x.does == "change" {
						s.Multiplier++
					}
					put()
				}
				b.at(0)
				b.tick()
				var w links.State
				if err := b.o.RerouteLinks.Lookup(links.Slot(b.index), &w); err != nil {
					t.Fatal(err)
				}
				if got := w.Reasons()&links.Probe != 0; got != x.want {
					st, _, err := b.w.status(0)
					t.Fatalf("step %d, %s: the link is bad: %t, want %t: %s, the neighbour %s, %v", i+1, x.does, got, x.want, st.State, st.Remote.State, err)
				}
			}
		})
	}
}

// Sessions with a real bfdd, shut down and started again. The link stays usable all the time.
func TestMaintenanceOfBFDD(t *testing.T) {
	frrtest.Need(t, "bfdd")
	s := newSide(t)
	r := frrtest.Start(t, s.there, "far", map[string]string{"bfdd": `bfd
 peer 10.9.0.1 local-address 10.9.0.2 interface w0
  detect-multiplier 125
  receive-interval 40
  transmit-interval 40
 exit
`})
	x := s.session(1, "10.9.0.1", "10.9.0.2")
	x.Link = s.index
	s.put(x)
	s.up(true, x)
	s.agree(x)
	shutdown := func(no string) {
		r.Vtysh("configure terminal", "bfd", "peer 10.9.0.1 local-address 10.9.0.2 interface w0", no+"shutdown")
	}
	var bad, looks int
	until := func(what string, does func(), f func(Status) bool) {
		t.Helper()
		var did sync.WaitGroup
		defer did.Wait()
		did.Go(does)
		for end := time.Now().Add(60 * time.Second); !f(s.status(x)); time.Sleep(200 * time.Microsecond) {
			if looks++; s.bad() {
				bad++
			}
			if time.Now().After(end) {
				t.Fatalf("not in 60 s: %s: %+v", what, s.status(x))
			}
		}
	}
	for range 2 {
		until("shut down", func() { shutdown("") }, func(st Status) bool { return st.Remote.State == bfd.AdminDown && st.State == bfd.Down })
		until("up again", func() { shutdown("no ") }, func(st Status) bool { return st.State == bfd.Up })
		s.agree(x)
	}
	if bad > 0 {
		t.Errorf("the link was bad in %d of %d looks: %+v", bad, looks, s.status(x))
	}
	s.cut()
	s.up(false, x)
	nstest.Until(s, "a failure has the link bad", s.bad)
}
