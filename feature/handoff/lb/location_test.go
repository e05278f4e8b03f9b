// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/handoff/lb/locate"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/feature/handoff/peer/peertest"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// TestRegisterAtAnothersLocation checks that a backend cannot take the location of a connected one
// by registering another of its addresses. Sessions there continue. The location is free once its
// backend has left it.
func TestRegisterAtAnothersLocation(t *testing.T) {
	sc, ca, a, at := managed(t, AgentOptions{Register: true})
	serve(t, sc.hosts, service4)
	one := register(t, ca, at, "h1", 1, peer.Registration{Address: netip.MustParseAddr("10.2.0.2"), Weight: 1})
	waitOwners(t, sc, service4, "1")
	c := dial(t, sc.client, service4)
	asks := func(word string) {
		t.Helper()
		if got, err := ask(c, word, patience); err != nil || got != "1"+word {
			t.Fatalf("%q, %v", got, err)
		}
	}
	asks("a")
	place := locate.Location{Interface: nstest.Ifindex(t, sc.middle, "h1"), MAC: mac(t, sc.hosts[0])}.Key()
	evil := register(t, ca, at, "evil", 3, peer.Registration{Address: netip.MustParseAddr("fd02:0::2"), Weight: 9})
	nstest.Eventually(t, func() error {
		st, err := a.Status()
		if owner := a.f.locations().Owner(place); owner != 1 {
			t.Fatalf("the place of h1 is backend %d's", owner)
		}
		if err == nil && len(st.Backends) == 2 && !st.Backends[1].Up && strings.Contains(st.Backends[1].Reason, "backend h1 is at the same location") {
			return nil
		}
		return fmt.Errorf("%+v, %v", st.Backends, err)
	})
	asks("b")
	waitOwners(t, sc, service4, "1")
	evil.c.Close()
	nstest.Eventually(t, func() error {
		if st, err := a.Status(); err != nil || st.Backends[1].Connected {
			return fmt.Errorf("%+v, %v", st.Backends, err)
		}
		return nil
	})
	asks("c")
	if owner := a.f.locations().Owner(place); owner != 1 {
		t.Fatalf("the place of h1 is backend %d's", owner)
	}
	if err := one.c.Register(peer.Registration{Address: netip.MustParseAddr("10.2.0.77"), Weight: 1}); err != nil {
		t.Fatal(err)
	}
	nstest.Eventually(t, func() error {
		if owner := a.f.locations().Owner(place); owner != 3 {
			return fmt.Errorf("the place that h1 has left is backend %d's", owner)
		}
		return nil
	})
}

// TestOwnerTakesLocation checks that a backend whose agent connects from its location gets it, even
// after another one has registered a second address of the machine first.
func TestOwnerTakesLocation(t *testing.T) {
	sc := newScene(t)
	sc.f.Close()
	serve(t, sc.hosts, service4)
	root := kernel.OpenRoot(nstest.BPFFS + "/lb-location")
	ca := peertest.NewAuthority(t)
	stop := running(t, sc, root, fileOf(ca, sc.devices, "register: true\n"))
	t.Cleanup(func() {
		stop()
		if err := Remove(context.Background(), root, sc.middle, "lb"); err != nil {
			t.Error(err)
		}
	})
	from(t, sc.hosts[1], ca, "evil", 5, "fd02:0::2").hears(t, func(p peer.Peers) bool { return len(ups(p)) == 1 })
	from(t, sc.hosts[0], ca, "h1", 1, "10.2.0.2")
	status(t, root, func(st Status) bool {
		return len(st.Backends) == 2 && st.Backends[0].Name == "h1" && st.Backends[0].Up &&
			!st.Backends[1].Up && strings.Contains(st.Backends[1].Reason, "backend h1 is at the same location")
	})
	dialed(t, sc)
}
