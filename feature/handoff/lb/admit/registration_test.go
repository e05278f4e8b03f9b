// SPDX-License-Identifier: Apache-2.0

package admit_test

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/handoff/lb/admit"
	"github.com/weir-project/weir/feature/handoff/lb/spec"
	"github.com/weir-project/weir/feature/handoff/peer"
)

// TestRegistration checks which registrations are accepted, and the reasons of the others.
func TestRegistration(t *testing.T) {
	services := []spec.Service{{Name: "web", Listen: netip.MustParseAddrPort("192.0.2.1:80")}}
	at := netip.MustParseAddr
	for says, r := range map[string]peer.Registration{
		"":                                   {Address: at("::ffff:10.0.0.1"), Weight: 1, Services: []string{"web"}},
		"want a unicast address":             {Address: at("224.0.0.1")},
		"address \"invalid IP\"":             {},
		"weight -1: want 0 to":               {Address: at("10.0.0.1"), Weight: -1},
		"service \"mail\": this load":        {Address: at("10.0.0.1"), Services: []string{"mail"}},
		"192.0.2.1 belongs to service web":   {Address: at("192.0.2.1")},
		"has a zone: give an address":        {Address: at("fe80::1%eth0")},
		"agent \"nowhere\": want an address": {Address: at("10.0.0.1"), Agent: "nowhere"},
	} {
		err := admit.Registration(&r, services)
		if (err == nil) != (says == "") || err != nil && !strings.Contains(err.Error(), says) {
			t.Errorf("%+v: %v, want %q", r, err, says)
		}
	}
	r := peer.Registration{Address: at("::ffff:10.0.0.1"), Unserved: []string{"gone", "web"}}
	if err := admit.Registration(&r, services); err != nil || r.Address != at("10.0.0.1") || !slices.Equal(r.Unserved, []string{"web"}) {
		t.Errorf("%+v, %v: want the IPv4 address, and web alone", r, err)
	}
}
