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

// knows waits until a made up flow is known, or is not.
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

// One backend's word makes no more than half the table known, and leaves room for another's. It is worth nothing soon after the backend
// has gone.
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

// A backend that has only registered is forgotten when it has been away for idle_timeout, and another one may have its number.
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
