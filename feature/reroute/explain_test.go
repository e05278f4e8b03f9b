// SPDX-License-Identifier: Apache-2.0

package reroute

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/reroute/bfd/engine"
	"github.com/weir-project/weir/feature/reroute/protect"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// Explain names the output of a forwarded packet: the link, its repair, or none.
func TestExplain(t *testing.T) {
	w := newWorld(t)
	apply := func(shadow bool) {
		w.apply(fmt.Sprintf(`
reroute:
  - {name: there, netns: %[1]s, interface: r12, shadow: %[2]t, repairs: [{segments: [fc00:3::e, fc00:2::d6], interface: r13, via: "fd00:13::3"}]}
  - {name: around, netns: %[1]s, interface: r13, repairs: [{interface: r12, via: "fd00:12::2"}]}
`, w.name[w.r1], shadow))
	}
	apply(false)
	explain := func(to string) []feature.Verdict {
		t.Helper()
		p, err := feature.ParsePacket("udp", "[fd00:a::2]:9001", to)
		if err != nil {
			t.Fatal(err)
		}
		p.Netns, p.Interface = w.name[w.r1], "in"
		got, err := Feature{}.Explain(t.Context(), w.root, p)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	check := func(text, result string, warning bool) {
		t.Helper()
		got := explain("[fd00:d::2]:9000")
		if len(got) != 1 || got[0].Step != "reroute path there" || !strings.Contains(got[0].Text, text) || got[0].Result != result || got[0].Warning != warning || got[0].Stage != feature.StageForward {
			t.Errorf("explained %+v, want %q, %q", got, text, result)
		}
	}
	for _, to := range []string{"[fd00:12::1]:9000", "[fd00:a::7]:9000"} { // local, and by a link without a path
		if got := explain(to); len(got) != 0 {
			t.Errorf("%s: %+v", to, got)
		}
	}
	drain := func(path string) {
		w.locked(func(l *kernel.WriteLock) error { return Drain(l, path) })
	}
	check("link r12 is used", "", false)
	drain("there")
	check("link r12 may not be used (drained): the packet is rerouted by r13 to fd00:13::3", "forwarded to fd00:d::2, rerouted by r13 to fd00:13::3", false)
	drain("around")
	check("no way is left for IPv6 packets", "dropped: path there has no way left", true)
	apply(true)
	check("no repair for IPv6 packets may be used: they stay on it", "", true)
}

// This host's own packets, without an input interface, are explained for IPv4 and IPv6.
func TestExplainOwn(t *testing.T) {
	w := newWorld(t)
	nstest.Address(t, w.r1, "r12", netip.MustParsePrefix("10.12.0.1/24"))
	nstest.Address(t, w.r1, "in", netip.MustParsePrefix("10.1.0.1/24"))
	w.apply(fmt.Sprintf("reroute:\n  - {name: own, netns: %s, interface: r12, repairs: [{interface: r13, via: 'fd00:13::3'}]}\n", w.name[w.r1]))
	for from, to := range map[string]string{"[fd00:a::1]:9": "[fd00:12::2]:7", "10.1.0.1:9": "10.12.0.2:7"} {
		p, err := feature.ParsePacket("udp", from, to)
		if err != nil {
			t.Fatal(err)
		}
		p.Netns, p.Interface = w.name[w.r1], "in"
		got, err := Feature{}.Explain(t.Context(), w.root, p)
		if err != nil || len(got) != 1 || !strings.Contains(got[0].Text, "link r12 is used") {
			t.Errorf("%s to %s: %+v, %v", from, to, got, err)
		}
	}
}

// A packet for a gateway without a link address never reaches the rerouting program.
func TestExplainUnresolved(t *testing.T) {
	to, gateway := netip.MustParseAddr("2001:db8::7"), netip.MustParseAddr("fd00:12::2")
	p := protect.PathState{Name: "core", Device: "eth1", Attached: true, Down: true, Carrier: true, Unresolved: []netip.Addr{gateway},
		Repairs: []protect.RepairState{{Device: "eth2", IPv6: true, Via: netip.MustParseAddr("fd00:13::3")}}}
	if v := verdict(p, to, gateway); !strings.Contains(v.Text, "no link address of fd00:12::2 is known") || v.Result != "dropped: the gateway fd00:12::2 does not answer" || !v.Warning {
		t.Errorf("%+v", v)
	}
	if v := verdict(p, to, netip.MustParseAddr("fd00:12::3")); !strings.Contains(v.Text, "rerouted by eth2") {
		t.Errorf("by another gateway: %+v", v)
	}
}

// Control packets of a BFD session reach no socket, but are not rejected.
func TestExplainBFD(t *testing.T) {
	w := newWorld(t)
	if err := kernel.Require(engine.Needs()); err != nil {
		t.Skip("need: kernel", err)
	}
	w.apply(fmt.Sprintf("reroute: [{name: there, netns: %s, interface: r12, bfd: {peer: \"fd00:12::2\"}}]", w.name[w.r1]))
	for from, want := range map[string]string{"[fd00:12::2]:49152": "received by BFD session there", "[fd00:12::3]:49152": ""} {
		p, err := feature.ParsePacket("udp", from, "[fd00:12::1]:3784")
		if err != nil {
			t.Fatal(err)
		}
		p.Netns, p.Interface = w.name[w.r1], "r12"
		got, err := Feature{}.Explain(t.Context(), w.root, p)
		if err != nil || (want == "") != (len(got) == 0) || len(got) > 0 && got[0].Result != want {
			t.Errorf("from %s: %+v, %v; want %q", from, got, err, want)
		}
	}
}
