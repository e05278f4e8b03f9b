// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/feature/handoff/peer/peertest"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// accepted waits until a backend is registered. It connects again after each rejection.
func accepted(t *testing.T, ca *peertest.Authority, at, name string, r peer.Registration) {
	t.Helper()
	nstest.Eventually(t, func() error {
		h := register(t, ca, at, name, 5, r)
		said := func() peer.Peers {
			h.mu.Lock()
			defer h.mu.Unlock()
			return h.told
		}
		for range 100 {
			switch p := said(); {
			case p.Rejected != "":
				h.c.Close()
				return errors.New(p.Rejected)
			case len(p.Members) > 0:
				return nil
			}
			time.Sleep(10 * time.Millisecond)
		}
		return errors.New("not announced")
	})
}

// TestDrainedFreesNumber checks that a drained backend's number and address are free once its agent
// has left. Otherwise the refusals name the remedies, and the status lists the number.
func TestDrainedFreesNumber(t *testing.T) {
	_, ca, a, at := managed(t, AgentOptions{Register: true})
	r := peer.Registration{Address: netip.MustParseAddr("10.2.1.2"), Weight: 1}
	h := register(t, ca, at, "s5", 5, r)
	h.hears(t, func(p peer.Peers) bool { return len(ups(p)) == 1 })
	register(t, ca, at, "s5x", 5, r).refused(t, "number 5 belongs to backend s5: use another number")
	h.c.Close()
	nstest.Eventually(t, func() error {
		if o, _ := a.f.names.Owner(5); o.Left == 0 {
			return errors.New("no time of the disconnection is kept")
		}
		return nil
	})
	register(t, ca, at, "s5x", 5, r).refused(t, ", or name s5x with number 5 in lb.backends for a moment")
	register(t, ca, at, "s6", 6, r).refused(t, "address 10.2.1.2 is backend s5's, absent since ")
	h = register(t, ca, at, "s5", 5, r)
	h.hears(t, func(p peer.Peers) bool { return len(ups(p)) == 1 })
	if o, _ := a.f.names.Owner(5); o.Left != 0 {
		t.Errorf("%+v is connected, and has a time of absence", o)
	}
	r.Weight = 0
	if err := h.c.Register(r); err != nil {
		t.Fatal(err)
	}
	h.hears(t, func(p peer.Peers) bool { return len(p.Members) == 1 && p.Members[0].Weight == 0 })
	k := Key{Client: netip.MustParseAddrPort("10.1.0.9:9")}
	if err := a.f.Learn(k, 5, 0); err != nil {
		t.Fatal(err)
	}
	h.c.Close()
	nstest.Eventually(t, func() error {
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.backends[5] != nil || a.flowsOf[5] != 1 {
			return errors.New("connected, or its flow is not counted")
		}
		return nil
	})
	register(t, ca, at, "s5x", 5, r).refused(t, ": free after its flows, and not before ")
	if err := a.f.maps.LbFlows.Delete(k.Raw()); err != nil {
		t.Fatal(err)
	}
	r.Weight = 1
	accepted(t, ca, at, "s5x", r)
}

// TestDrainedAtPartner checks that a backend drained at the partner is forgotten here, too, once the
// partner has forgotten it. The partner would otherwise keep the number for it.
func TestDrainedAtPartner(t *testing.T) {
	_, a, _ := managedPair(t, nil)
	has := func(yes bool) {
		t.Helper()
		nstest.Eventually(t, func() error {
			a.mu.Lock()
			defer a.mu.Unlock()
			if o, _ := a.f.names.Owner(5); (a.members[5] != nil) != yes || !yes && o.Name != "" && !o.Loose {
				return fmt.Errorf("member %+v, owner %+v: want them: %t", a.members[5], o, yes)
			}
			return nil
		})
	}
	w := peer.Member{Name: "s5", Number: 5, Address: netip.MustParseAddr("10.2.1.2"), Connected: true, Up: true}
	a.partnerSaid(peer.Peers{Members: []peer.Member{w}, Pair: &peer.Pair{}})
	has(true)
	a.partnerSaid(peer.Peers{Pair: &peer.Pair{Kept: map[move.Backend]string{5: "s5"}}})
	time.Sleep(1500 * time.Millisecond) // a count of flows is between
	has(true)
	a.partnerSaid(peer.Peers{Pair: &peer.Pair{}})
	has(false)
}

// TestFileNameIsFree checks that a number named by the file alone is free once the file no longer
// names it, and kept if an agent of the name has connected.
func TestFileNameIsFree(t *testing.T) {
	sc, ca, a, at := managed(t, AgentOptions{Managed: []Managed{{Number: 5, Name: "s5", Weight: 1}, {Number: 6, Name: "typo", Address: netip.MustParseAddr("10.2.1.2"), Weight: 1}}})
	if o, _ := a.f.names.Owner(5); o.Name != "s5" || !o.Loose {
		t.Errorf("%+v: want s5, loose", o)
	}
	register(t, ca, at, "s5", 5, peer.Registration{}).hears(t, func(p peer.Peers) bool { return p.Rejected != "" })
	if o, _ := a.f.names.Owner(5); o.Loose {
		t.Errorf("%+v has connected, and is loose", o)
	}
	if err := errors.Join(sc.f.names.Keep(7, "typo7"), sc.f.names.Loosen(7, true)); err != nil { // as of an earlier file
		t.Fatal(err)
	}
	_, b, _ := manage(t, sc, AgentOptions{Register: true})
	nstest.Eventually(t, func() error {
		b.mu.Lock()
		defer b.mu.Unlock()
		return errors.Join(b.owns(6, "s6"), b.owns(7, "s7"))
	})
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.owns(5, "other"); err == nil || !strings.Contains(err.Error(), "number 5 belongs to backend s5, absent since ") {
		t.Errorf("%v: want a number kept for s5", err)
	}
}

// TestAbsenceOutlivesAgent checks that idle_timeout of an absent backend's number does not begin
// again with a restart of the agent, and that the status lists the number.
func TestAbsenceOutlivesAgent(t *testing.T) {
	const idle = 5 * time.Minute
	sc := newScene(t)
	now := kernel.Monotonic()
	if err := errors.Join(sc.f.SetBackends([]Backend{}), sc.f.names.Keep(5, "s5"), sc.f.names.Leave(5, now-min(now, uint64(idle-5*time.Second)))); err != nil {
		t.Fatal(err)
	}
	_, a, _ := manage(t, sc, AgentOptions{Register: true, IdleTimeout: idle})
	st, err := a.Status()
	if i := len(st.Kept) - 1; err != nil || i < 0 || st.Kept[i].Name != "s5" || st.Kept[i].Number != 5 || st.Kept[i].Free <= 0 || st.Kept[i].Free > 5 {
		t.Errorf("%+v, %v: want number 5 kept for s5, for less than 5 s", st.Kept, err)
	}
	nstest.Eventually(t, func() error {
		if o, owned := a.f.names.Owner(5); owned {
			return fmt.Errorf("number 5 is %s's", o.Name)
		}
		return nil
	})
}
