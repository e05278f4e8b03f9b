// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/handoff/lb/bpf"
	"github.com/weir-project/weir/feature/handoff/lb/flow"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// endsAfter sets the ended timeout of the data path, as the agent does.
func (s *scene) endsAfter(t *testing.T, d time.Duration) {
	t.Helper()
	s.f.ended = uint32(d.Milliseconds())
	if err := s.f.configure(); err != nil {
		t.Fatal(err)
	}
}

// drained directs new flows to the other backend while this one is well.
func (s *scene) drained(t *testing.T, number move.Backend) {
	t.Helper()
	backends := slices.Clone(s.f.backends)
	for i := range backends {
		if backends[i].Weight, backends[i].Unwell = 1, false; backends[i].Number == number {
			backends[i].Weight = 0
		}
	}
	if err := s.f.SetBackends(backends); err != nil {
		t.Fatal(err)
	}
}

// quieten sets a flow's latest packet to two seconds ago.
func quieten(t *testing.T, f *DataPath, k Key) {
	t.Helper()
	change(t, f, k, func(v *bpf.LBLbFlow) { v.Seen = kernel.Monotonic() - uint64(2*time.Second) })
}

// isReset forges resets of a client until the flow counts as reset by its client. A backend
// repeating an answer revives it.
func (s *scene) isReset(t *testing.T, k Key) {
	t.Helper()
	nstest.Eventually(t, func() error {
		fl, err := s.f.Flow(k)
		if err == nil && fl.Ended && fl.ClientReset {
			return nil
		}
		forge(t, s, k.Client, service4, tcpRST)
		return fmt.Errorf("%+v, %v: want it ended by its client's reset", fl, err)
	})
}

// TestResetMadeUp checks that a forged reset of the client does not cut a silent session if the
// hash leads to another backend by now. A flow found again by the hash is forgotten.
func TestResetMadeUp(t *testing.T) {
	for name, leads := range map[string]func(*scene, *testing.T, move.Backend){"drained": (*scene).drained, "not well": (*scene).unwell} {
		t.Run(name, func(t *testing.T) {
			sc := newScene(t)
			all := slices.Clone(sc.f.backends)
			c, k, owner, _ := session(t, sc)
			resets := func(forgotten int) {
				t.Helper()
				nstest.Eventually(t, func() error { // the client may acknowledge an answer late
					sc.isReset(t, k)
					quieten(t, sc.f, k)
					if n, err := sc.f.Forget(time.Second, time.Hour); n != forgotten || err != nil {
						return fmt.Errorf("%d flows are forgotten, %v: want %d", n, err, forgotten)
					}
					if fl, err := sc.f.Flow(k); forgotten == 0 && !fl.ClientReset {
						return fmt.Errorf("%+v, %v: its backend has gone on", fl, err)
					}
					return nil
				})
				if got, err := ask(c, "b", patience); err != nil || got[0] != byte('0'+owner) {
					t.Fatalf("%q, %v: want an answer of backend %d", got, err, owner)
				}
				becomes(t, sc.f, k, "alive", func(fl Flow) bool { return !fl.Ended && fl.Owner == owner })
			}
			leads(sc, t, owner)
			resets(0)
			if err := sc.f.SetBackends(all); err != nil {
				t.Fatal(err)
			}
			resets(1)
		})
	}
}

// TestForgetsReset checks that flows outside the hash stay only if they were opened and are ended
// by nothing but the client's reset. They are removed after a long silence like others.
func TestForgetsReset(t *testing.T) {
	f := newTable(t, 0) // no backend has a bucket
	k := Key{Client: netip.MustParseAddrPort("10.1.0.77:5555")}
	put := func(flags uint32) {
		t.Helper()
		if err := f.maps.LbFlows.Put(k.Raw(), bpf.LBLbFlow{Word: 1, Seen: kernel.Monotonic() - uint64(2*time.Second), In: 3, Out: 2, Flags: flags}); err != nil {
			t.Fatal(err)
		}
	}
	forgets := func(name string, flags uint32, idle time.Duration, want int) {
		t.Helper()
		put(flags)
		if n, err := f.Forget(time.Second, idle); n != want || err != nil {
			t.Errorf("%s: %d flows are forgotten, %v: want %d", name, n, err, want)
		}
	}
	for name, c := range map[string]struct {
		flags uint32
		want  int
	}{
		"the client's reset":             {flow.WasReset, 0},
		"and its end":                    {flow.WasReset | flow.FinIn, 0},
		"the backend's reset":            {flow.WasReset | flow.ResetOut | flow.OwnerReset, 1},
		"and then the client's":          {flow.WasReset | flow.OwnerReset, 1},
		"the backend's end, and a reset": {flow.WasReset | flow.FinOut, 1},
		"both ends, and a reset":         {flow.WasReset | flow.FinIn | flow.FinOut, 1},
		"both ends":                      {flow.FinIn | flow.FinOut, 1},
		"never opened":                   {flow.WasReset | flow.Opening, 1},
	} {
		forgets(name, c.flags, time.Hour, c.want)
	}
	forgets("silent for long", flow.WasReset, time.Second, 1)
	for most, want := range map[time.Duration]int{time.Second: 1, time.Hour: 0} { // without a report of the owner's agent
		put(flow.WasReset)
		c := newCensus()
		c.slack = most - time.Hour/4
		if n, err := f.forget(time.Second, time.Hour, &sync.Mutex{}, c); n != want || err != nil {
			t.Errorf("without a word for %s: %d flows are forgotten, %v: want %d", most, n, err, want)
		}
	}
	if err := f.maps.LbRing.Put(uint32(k.Bucket()), uint16(1)); err != nil {
		t.Fatal(err)
	}
	forgets("the hash finds it", flow.WasReset, time.Hour, 1)
}

// TestForgetsResets checks that a flood of connections opened and reset by clients keeps at most an
// eighth of the table.
func TestForgetsResets(t *testing.T) {
	f := newTable(t, 0)
	room := int(f.maps.LbFlows.MaxEntries()) / 8
	fill := func(from, n int) {
		t.Helper()
		keys, values := make([]bpf.LBLbFlowKey, n), make([]bpf.LBLbFlow, n)
		for i := range keys {
			keys[i].Client, keys[i].Port = [16]byte{10: 0xff, 0xff, 10, 1, byte((from + i) >> 8), byte(from + i)}, 7
			values[i] = bpf.LBLbFlow{Word: 1, Seen: kernel.Monotonic() - uint64(2*time.Second), In: 2, Out: 1, Flags: flow.WasReset}
		}
		if _, err := f.maps.LbFlows.BatchUpdate(keys, values, nil); err != nil {
			t.Fatal(err)
		}
	}
	forgets := func(want int) {
		t.Helper()
		if n, err := f.Forget(time.Second, time.Hour); n != want || err != nil {
			t.Errorf("%d flows are forgotten, %v: want %d", n, err, want)
		}
	}
	fill(0, room)
	forgets(0)
	forgets(0)
	fill(room, 1)
	forgets(0)
	forgets(room + 1)
	fill(0, 1)
	forgets(0)
}

// TestStillAfterReset checks that a backend's report keeps its session's flow known after a
// client's reset.
func TestStillAfterReset(t *testing.T) {
	sc := newScene(t)
	k := Key{Client: netip.MustParseAddrPort("10.1.0.77:5555")}
	a := &Agent{f: sc.f, o: AgentOptions{IdleTimeout: time.Hour}}
	for flags, want := range map[uint32]bool{0: true, flow.WasReset: true, flow.WasReset | flow.Named: true, flow.WasReset | flow.OwnerReset: false, flow.FinIn | flow.FinOut: false} {
		seen := kernel.Monotonic() // even if very recent
		if err := sc.f.maps.LbFlows.Put(k.Raw(), bpf.LBLbFlow{Word: 1, Seen: seen, In: 3, Out: 2, Flags: flags}); err != nil {
			t.Fatal(err)
		}
		fl, err := sc.f.Flow(k)
		if err != nil {
			t.Fatal(err)
		}
		if err := a.still(k, fl, peer.FlowRecord{}); err != nil {
			t.Error(err)
		}
		if now, err := sc.f.Flow(k); err != nil || now.Seen > seen != want || now.Named != want {
			t.Errorf("flags %d: %+v, %v", flags, now, err)
		}
	}
}

// TestReopenedDrained checks a client reconnecting from the same port long after a reset. The
// backend of its bucket serves it, and not a drained one. If the drained backend's agent has
// reported the session, the SYN goes to it. Its answer begins a new, unreported session.
func TestReopenedDrained(t *testing.T) {
	for name, flags := range map[string]uint32{"nobody has told of it": 0, "its agent has told of it": flow.Named} {
		t.Run(name, func(t *testing.T) {
			sc := newScene(t)
			c, k, owner, want := session(t, sc)
			if flags != 0 {
				want = owner
			}
			if err := c.(*net.TCPConn).SetLinger(0); err != nil {
				t.Fatal(err)
			}
			c.Close()
			becomes(t, sc.f, k, "ended", func(fl Flow) bool { return fl.ClientReset })
			sc.drained(t, owner)
			sc.endsAfter(t, time.Second)
			change(t, sc.f, k, func(v *bpf.LBLbFlow) { v.Flags |= flags })
			quieten(t, sc.f, k)
			if err := <-sc.begin(t, k); err != nil {
				t.Error(err)
			}
			if fl, err := sc.f.Flow(k); err != nil || fl.Owner != want || fl.Named || fl.Opening {
				t.Errorf("%+v, %v: want backend %d's", fl, err, want)
			}
		})
	}
}

// TestResetLongAgo checks that an unwell backend keeps its session if it answers the SYN after a
// forged reset.
func TestResetLongAgo(t *testing.T) {
	sc := newScene(t)
	c, k, owner, _ := session(t, sc)
	sc.endsAfter(t, time.Second)
	sc.unwell(t, owner)
	sc.isReset(t, k)
	change(t, sc.f, k, func(v *bpf.LBLbFlow) { v.Flags |= flow.Named })
	quieten(t, sc.f, k)
	forges := func(flags byte, what string, is func(before, now Flow) bool) {
		t.Helper()
		before, err := sc.f.Flow(k)
		if err != nil {
			t.Fatal(err)
		}
		forge(t, sc, k.Client, service4, flags)
		becomes(t, sc.f, k, what, func(now Flow) bool { return now.In > before.In && is(before, now) })
		quieten(t, sc.f, k)
	}
	forges(tcpSYN, "answered", func(before, now Flow) bool { return now.Out > before.Out && !now.Unanswered && !now.Ended })
	forges(tcpSYN, "where it was", func(_, now Flow) bool { return now.Owner == owner && now.Epoch == 0 })
	if got, err := ask(c, "b", patience); err != nil || got[0] != byte('0'+owner) {
		t.Errorf("%q, %v: want an answer of backend %d", got, err, owner)
	}
}

// TestPartnerResetMadeUp checks that a forged reset at one load balancer does not cut a session at
// the other one with another hash.
func TestPartnerResetMadeUp(t *testing.T) {
	p := newPairOfLBs(t, [2][2]int{{1, 0}, {0, 1}})
	p.start(0)
	p.start(1)
	c := dial(t, p.client, service4)
	if got, err := ask(c, "a", patience); err != nil || got[0] != '1' {
		t.Fatalf("%q, %v", got, err)
	}
	k := keyOfConn(c, 0)
	p.knows(1, k, func(fl Flow, err error) bool { return err == nil && fl.Owner == 1 })
	nstest.Until(t, "the shares of the other one are known", func() bool { return p.agents[0].pair.elsewhereThere(k, 1) })
	(&scene{client: p.client, f: p.lbs[0]}).isReset(t, k)
	nstest.Steadily(t, 2500*time.Millisecond, func() error { // one would forget it within a second, the other one a second later
		for i, f := range p.lbs {
			if _, err := f.Flow(k); err != nil {
				return fmt.Errorf("%s: %w", lbNames[i], err)
			}
		}
		return nil
	})
	p.by(1)
	if got, err := ask(c, "b", patience); err != nil || got[0] != '1' {
		t.Errorf("by the other load balancer: %q, %v", got, err)
	}
}
