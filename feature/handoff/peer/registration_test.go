// SPDX-License-Identifier: Apache-2.0

package peer_test

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/feature/handoff/peer/peertest"
)

// TestRegistrationCheck checks the limit of each field of a registration.
func TestRegistrationCheck(t *testing.T) {
	at := netip.MustParseAddr("10.2.0.2")
	long := strings.Repeat("a", 253)
	many := make([]string, 65)
	for i := range many {
		many[i] = fmt.Sprint("service", i)
	}
	for _, c := range []struct {
		r    peer.Registration
		says string // "": it is right
	}{
		{peer.Registration{Address: at}, ""},
		{peer.Registration{Address: at, Agent: long + ":65535", Services: many[:64], Unserved: many[:64]}, ""},
		{peer.Registration{Address: at, Agent: "[2001:db8::1]:7"}, ""},
		{peer.Registration{Address: at, Agent: "[fe80::1%eth0]:7"}, ""},
		{peer.Registration{Address: at, Services: slices.Repeat([]string{"one"}, 100)}, ""},
		{peer.Registration{Address: at, Agent: long + "12345678:7"}, "want an address for agents"},
		{peer.Registration{Address: at, Agent: "host"}, "want an address for agents"},
		{peer.Registration{Address: at, Agent: ":7"}, "want an address for agents"},
		{peer.Registration{Address: at, Agent: "host:0"}, "want an address for agents"},
		{peer.Registration{Address: at, Agent: "ho<st:7"}, "want an address for agents"},
		{peer.Registration{Address: at, Agent: "ho\x00st:7"}, "want an address for agents"},
		{peer.Registration{Address: at, Services: many}, "65 services"},
		{peer.Registration{Address: at, Unserved: many}, "65 services"},
		{peer.Registration{Address: at, Unserved: []string{strings.Repeat("s", 256)}}, "256 bytes"},
		{peer.Registration{Address: netip.MustParseAddr("fe80::1%eth0")}, "zone"},
	} {
		err := c.r.Check()
		if (err == nil) != (c.says == "") || err != nil && (!strings.Contains(err.Error(), c.says) || len(err.Error()) > 500) {
			t.Errorf("%.100v: %v, want %q", c.r, err, c.says)
		}
		if len(c.r.Services) == 100 {
			t.Error("names are repeated")
		}
	}
}

// TestPeersFit checks that Fit omits the longest members, and the rest arrives in one frame.
func TestPeersFit(t *testing.T) {
	ca := peertest.NewAuthority(t)
	a, b, errA, errB := pair(t, ca.TLS("host-a"), ca.TLS("lb"))
	if errA != nil || errB != nil {
		t.Fatal(errA, errB)
	}
	p := peer.Peers{Idle: 7}
	for i := range 1023 {
		m := peer.Member{Name: fmt.Sprint("host-", i), Number: move.Backend(i), Agent: "10.2.0.2:7947"}
		if i%100 == 0 {
			m.Services = slices.Repeat([]string{strings.Repeat("<", 100)}, 200) // 120 kB each
		}
		p.Members = append(p.Members, m)
	}
	if err := b.Tell(p); !errors.Is(err, peer.ErrTooLong) {
		t.Fatalf("%v", err)
	}
	fits, left := p.Fit()
	if len(left) == 0 || len(left) > 11 || len(fits.Members)+len(left) != 1023 || len(p.Members) != 1023 {
		t.Fatalf("%d fit, left out: %q", len(fits.Members), left)
	}
	if all, none := fits.Fit(); len(all.Members) != len(fits.Members) || none != nil {
		t.Errorf("then %d fit", len(all.Members))
	}
	told := make(chan peer.Peers, 1)
	a.Handle(peer.Control{Peers: func(p peer.Peers) { told <- p }})
	ended := make(chan error, 1)
	go func() { _, err := a.Receive(); ended <- err }()
	if err := b.Tell(fits); err != nil {
		t.Fatal(err)
	}
	select {
	case got := <-told:
		if len(got.Members) != len(fits.Members) || got.Idle != 7 {
			t.Errorf("%d members came", len(got.Members))
		}
	case err := <-ended:
		t.Fatal(err)
	}
}
