// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/handoff/lb/bpf"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// newlyBegun returns a new load balancer in its startup, with its agent.
func newlyBegun(t *testing.T) (*scene, *agents) {
	t.Helper()
	sc := newScene(t)
	sc.f.startupUntil.Store(kernel.Monotonic() + uint64(10*time.Minute))
	if err := sc.f.configure(); err != nil {
		t.Fatal(err)
	}
	return sc, newAgents(t, sc.f, time.Second)
}

func (s *agents) owns(host move.Backend, last bool, records ...peer.FlowRecord) {
	s.t.Helper()
	if err := s.hosts[host].TellFlows(records, last); err != nil {
		s.t.Fatal(err)
	}
}

func (s *agents) settledAs(f *DataPath) {
	s.t.Helper()
	nstest.Eventually(s.t, func() error {
		if f.startupUntil.Load() != 0 {
			return errors.New("it waits still")
		}
		return nil
	})
}

// TestOwned checks that the reports of two hosts about one session give one owner in either order:
// the host with the session.
func TestOwned(t *testing.T) {
	client := func(port uint16) Key { return Key{Client: netip.AddrPortFrom(netip.MustParseAddr("10.1.0.2"), port)} }
	of := func(port uint16, r peer.FlowRecord) peer.FlowRecord {
		r.Flow = peer.Flow{Client: client(port).Client}
		return r
	}
	cases := []struct {
		name     string
		one, two peer.FlowRecord // of hosts 1 and 2
		owner    move.Backend    // 0: it stays unknown
		to       move.Backend
		epoch    move.Epoch
	}{
		{"the later epoch", peer.FlowRecord{Epoch: 2}, peer.FlowRecord{Epoch: 4}, 2, 0, 4},
		{"the one that was heard later", peer.FlowRecord{Age: time.Hour}, peer.FlowRecord{Age: time.Second}, 2, 0, 0},
		{"about to move, and not there", peer.FlowRecord{Epoch: 2, To: 2}, peer.FlowRecord{}, 1, 2, 2},
		{"about to move, and there", peer.FlowRecord{Epoch: 2, To: 2}, peer.FlowRecord{Epoch: 3}, 2, 0, 3},
		{"about to move, and there without an epoch", peer.FlowRecord{Epoch: 2, To: 2}, peer.FlowRecord{}, 2, 0, 0},
		{"about to move, there and silent", peer.FlowRecord{Epoch: 2, To: 2}, peer.FlowRecord{Epoch: 3, Quiet: true}, 2, 0, 3},
		{"about to move, and ended there", peer.FlowRecord{Epoch: 2, To: 2}, peer.FlowRecord{Epoch: 3, Gone: true}, 0, 0, 0},
		{"given back", peer.FlowRecord{Epoch: 4}, peer.FlowRecord{Epoch: 3, Quiet: true}, 1, 0, 4},
		{"about to move where nobody is", peer.FlowRecord{Epoch: 2, To: 7}, peer.FlowRecord{}, 0, 0, 0},
	}
	absent := map[string]bool{"about to move, and not there": true, "about to move where nobody is": true}
	for _, order := range [][]move.Backend{{1, 2}, {2, 1}} {
		sc, s := newlyBegun(t)
		records := map[move.Backend][]peer.FlowRecord{}
		for i, c := range cases {
			records[1] = append(records[1], of(uint16(i+1), c.one))
			if !absent[c.name] {
				records[2] = append(records[2], of(uint16(i+1), c.two))
			}
		}
		for _, host := range order {
			s.owns(host, true, records[host]...)
		}
		s.settledAs(sc.f)
		for i, c := range cases {
			fl, err := sc.f.Flow(client(uint16(i + 1)))
			switch {
			case c.owner == 0 && !errors.Is(err, errNoFlow), c.owner != 0 && (err != nil || fl.Owner != c.owner || fl.To != c.to || fl.Epoch != c.epoch):
				t.Errorf("%s, hosts %v: %+v, %v", c.name, order, fl, err)
			}
		}
	}
}

// TestOwnedTraffic checks the startup: packets of unknown connections are dropped, new connections
// work, and hosts get no answer about unknown flows. No report replaces an owner seen since.
func TestOwnedTraffic(t *testing.T) {
	sc, s := newlyBegun(t)
	c, k, owner, other := session(t, sc)
	s.owns(other, false, peer.FlowRecord{Flow: peer.Flow{Client: k.Client}, Epoch: 9}, peer.FlowRecord{Flow: peer.Flow{Client: k.Client, Service: 7}})
	s.says(other, k, reclaim(1))
	s.hears(other) // all earlier messages were processed
	if err := sc.f.maps.LbFlows.Delete(k.Raw()); err != nil {
		t.Fatal(err)
	}
	silent(t, c, "b")
	unknown := Key{Client: netip.MustParseAddrPort("10.1.0.2:9")}
	s.says(owner, unknown, reclaim(1))
	s.says(owner, unknown, asksHold(1, other))
	if n, err := sc.f.Counts(); err != nil || n.Awaited == 0 {
		t.Errorf("%+v, %v", n, err)
	}
	s.owns(owner, true, peer.FlowRecord{Flow: peer.Flow{Client: k.Client}, Epoch: 4})
	answers(t, c, "b")
	s.owns(other, true)
	s.settledAs(sc.f)
	s.says(owner, unknown, reclaim(1))
	if m := s.hears(owner); m.Kind != move.Reclaimed || m.OK {
		t.Errorf("it hears %v first", m)
	}
	// A report of another host does not replace an owner seen here.
	s.owns(other, true, peer.FlowRecord{Flow: peer.Flow{Client: k.Client}, Epoch: 9})
	s.says(other, k, reclaim(1))
	s.hears(other) // processed after it
	if fl, err := sc.f.Flow(k); err != nil || fl.Owner != owner || fl.Epoch != 4 {
		t.Errorf("%+v, %v", fl, err)
	}
	// A flow known by its client's packets alone belongs to the reporting host.
	change(t, sc.f, k, func(v *bpf.LBLbFlow) { v.Out, v.Flags = 0, 0 })
	s.owns(other, true, peer.FlowRecord{Flow: peer.Flow{Client: k.Client}, Epoch: 9})
	becomes(t, sc.f, k, "the other host's", func(fl Flow) bool { return fl.Owner == other && fl.Epoch == 9 })
}

// TestSettleEnds checks that the startup ends at its deadline without all hosts, and without an
// agent. The data path then follows the hash.
func TestSettleEnds(t *testing.T) {
	sc := newScene(t)
	c, k, _, _ := session(t, sc)
	sc.f.startupUntil.Store(kernel.Monotonic() + uint64(300*time.Millisecond))
	if err := sc.f.configure(); err != nil {
		t.Fatal(err)
	}
	if err := sc.f.maps.LbFlows.Delete(k.Raw()); err != nil {
		t.Fatal(err)
	}
	if got, err := ask(c, "b", patience); err != nil {
		t.Errorf("without an agent: %q, %v", got, err)
	}
	sc.f.startupUntil.Store(kernel.Monotonic() + uint64(time.Second))
	newAgents(t, sc.f, time.Second).settledAs(sc.f)
}
