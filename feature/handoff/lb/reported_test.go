// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/internal/nstest"
)

func reportOf(port uint16) peer.FlowRecord {
	return peer.FlowRecord{Flow: peer.Flow{Service: 0, Client: netip.AddrPortFrom(netip.MustParseAddr("172.16.0.1"), port)}, Epoch: 1}
}

// knows waits until a forged flow is known, or unknown.
func knows(t *testing.T, sc *scene, port uint16, yes bool) {
	t.Helper()
	nstest.Eventually(t, func() error {
		_, err := sc.f.Flow(Key{Client: reportOf(port).Flow.Client})
		if errors.Is(err, errNoFlow) == yes {
			return fmt.Errorf("the flow from port %d: %v", port, err)
		}
		return nil
	})
}

// TestReportedFlows checks that one backend's reports fill at most half of the table and leave room
// for another's. They are forgotten soon after the backend disconnects.
func TestReportedFlows(t *testing.T) {
	sc, ca, a, at := managed(t, AgentOptions{Register: true})
	tell := func(h *registrar, port uint16) {
		t.Helper()
		if err := h.c.TellFlows([]peer.FlowRecord{reportOf(port)}, true); err != nil {
			t.Fatal(err)
		}
	}
	one := register(t, ca, at, "h1", 1, peer.Registration{Address: netip.MustParseAddr("10.2.0.2"), Weight: 1})
	two := register(t, ca, at, "h2", 2, peer.Registration{Address: netip.MustParseAddr("10.2.1.2"), Weight: 1})
	one.hears(t, func(p peer.Peers) bool { return len(p.Members) == 2 })
	tell(one, 1)
	tell(two, 2)
	knows(t, sc, 1, true)
	knows(t, sc, 2, true)
	most := int(sc.f.maps.LbFlows.MaxEntries())
	a.mu.Lock()
	a.reports.End(map[move.Backend]int{1: most / 2})
	for by, want := range map[move.Backend]bool{1: false, 2: true} {
		k := Key{Client: reportOf(uint16(10 + by)).Flow.Client}
		if err := a.report(k, by, move.Flow{Owner: by}); (err == nil) != want {
			t.Errorf("backend %d: %v", by, err)
		}
	}
	a.mu.Unlock()
	one.c.Close()
	nstest.Eventually(t, func() error {
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.backends[1] != nil {
			return errors.New("it is connected")
		}
		a.left[1] = time.Now().Add(-reportedFor)
		return nil
	})
	knows(t, sc, 1, false)
	knows(t, sc, 2, true)
}

// TestForgetMember checks that a registered backend is forgotten after an absence of idle_timeout,
// and that another one can get its number.
func TestForgetMember(t *testing.T) {
	_, ca, a, at := managed(t, AgentOptions{Register: true, IdleTimeout: 50 * time.Millisecond})
	r := peer.Registration{Address: netip.MustParseAddr("10.2.0.2"), Weight: 1}
	one := register(t, ca, at, "h1", 1, r)
	one.hears(t, func(p peer.Peers) bool { return len(p.Members) == 1 })
	one.c.Close()
	nstest.Eventually(t, func() error {
		if st, err := a.Status(); err != nil || len(st.Backends) != 0 {
			return fmt.Errorf("%+v, %v", st.Backends, err)
		}
		return nil
	})
	two := register(t, ca, at, "h2", 1, r)
	two.hears(t, func(p peer.Peers) bool { return len(p.Members) == 1 && p.Members[0].Name == "h2" })
}

// TestReportedByTeller checks that the report of a departed session counts against the reporting
// backend.
func TestReportedByTeller(t *testing.T) {
	sc, ca, a, at := managed(t, AgentOptions{Register: true})
	one := register(t, ca, at, "h1", 1, peer.Registration{Address: netip.MustParseAddr("10.2.0.2"), Weight: 1})
	register(t, ca, at, "h2", 2, peer.Registration{Address: netip.MustParseAddr("10.2.1.2"), Weight: 1})
	one.hears(t, func(p peer.Peers) bool { return len(ups(p)) == 2 })
	waitOwners(t, sc, service4, "12")
	most := int(sc.f.maps.LbFlows.MaxEntries())
	a.mu.Lock()
	defer a.mu.Unlock()
	port := uint16(0)
	tells := func(by, of move.Backend, want bool) {
		t.Helper()
		port++
		k := Key{Client: reportOf(port).Flow.Client}
		err := a.redirect(k, by, move.Message{Kind: move.Left, Backend: of, Epoch: 3})
		if (err == nil) != want {
			t.Errorf("backend %d of one at %d: %v", by, of, err)
		}
		if fl, err := sc.f.Flow(k); want && (err != nil || fl.Owner != of || fl.Reporter != by || !fl.Reported) {
			t.Errorf("%+v, %v", fl, err)
		}
	}
	a.reports.Begin()
	a.reports.End(map[move.Backend]int{1: most/2 - 2, 2: most/4 - 1})
	tells(1, 2, true)
	tells(1, 2, true)
	tells(1, 2, false)
	tells(2, 1, true)
	c := newCensus()
	if err := sc.f.Flows(func(_ Key, fl Flow) bool { c.count(fl); return true }); err != nil || c.unseen[1] != 2 || c.unseen[2] != 1 || c.owned[2] < 2 {
		t.Errorf("%+v, %v: want 2 of backend 1's word and 1 of backend 2's", c, err)
	}
}

// TestClaimForgotten checks that a session claimed during startup is known by report alone, and
// forgotten soon after its agent disconnects.
func TestClaimForgotten(t *testing.T) {
	sc, ca, a, at := managed(t, AgentOptions{Register: true})
	one := register(t, ca, at, "h1", 1, peer.Registration{Address: netip.MustParseAddr("10.2.0.2"), Weight: 1})
	one.hears(t, func(p peer.Peers) bool { return len(p.Members) == 1 })
	k := Key{Client: reportOf(1).Flow.Client}
	a.mu.Lock()
	a.startup = &startup{told: map[move.Backend]bool{}, ages: map[Key]time.Duration{}}
	err := a.decideClaim(claim{1, k, peer.FlowRecord{Flow: reportOf(1).Flow, Epoch: 1, Quiet: true}}, 0)
	a.startup = nil
	a.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	knows(t, sc, 1, true)
	one.c.Close()
	nstest.Eventually(t, func() error {
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.backends[1] != nil {
			return errors.New("it is connected")
		}
		a.left[1] = time.Now().Add(-reportedFor)
		return nil
	})
	knows(t, sc, 1, false)
}
