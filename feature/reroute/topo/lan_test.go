// SPDX-License-Identifier: Apache-2.0

package topo_test

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/reroute/topo"
)

// kept reads FRR 8.4.4's output about four routers on one LAN. isisd truncates two of the names to the same
// characters; the fourth router is overloaded (set-overload-bit; stub-router).
func kept(t *testing.T, file string, change ...string) *topo.Network {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", file))
	if err != nil {
		t.Fatal(err)
	}
	n, err := topo.Read(file, []byte(strings.NewReplacer(change...).Replace(string(text))))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// The adjacencies of a LAN have the fields needed by repairs: the router's own interface, and the neighbours'
// addresses.
func TestLAN(t *testing.T) {
	const ams, ber = "averylonghostname-in-amsterdam", "averylonghostname-in-berlin"
	for file, names := range map[string][4]string{
		"isis-lan.txt":   {"a", "b", ams, ber},
		"ospf6-lan.json": {"10.255.0.1", "10.255.0.2", "10.255.0.3", "10.255.0.4"},
	} {
		// With OSPFv3, a link of the router alone identifies it.
		n := kept(t, file, "\"interface\":\"lo\",\n      \"lsa\":[\n", "\"interface\":\"stub\",\n      \"lsa\":[{\"type\": \"Link\", \"linkStateId\": \"0.0.0.9\", \"advertisingRouter\": \"10.255.0.1\"}\n")
		var got []string
		for _, x := range n.Nodes {
			if x.Overload != (x.Name == names[3]) {
				t.Errorf("%s: %s: overload %v", file, x.Name, x.Overload)
			}
			for _, p := range x.Prefixes {
				// With OSPFv3, the LAN's own prefix has the metric of the router's interface.
				if (p.String() == "fd00:aa::1/128" || p.String() == "fd00:1::/64") && x.Metrics[p] != 10 {
					t.Errorf("%s: metrics of %s: %v", file, x.Name, x.Metrics)
				}
			}
		}
		for i, l := range n.Links {
			if n.Nodes[l.From].Name != n.Self {
				continue
			}
			if l.LAN == "" || l.Interface != "lan" || l.Metric != 10 {
				t.Errorf("%s: %s: %+v", file, n.LinkName(i), l)
			}
			got = append(got, n.Nodes[l.To].Name+" "+l.Remote.String())
		}
		slices.Sort(got)
		if want := slices.Sorted(slices.Values([]string{names[1] + " fe80::f877:ecff:fe03:151a", names[2] + " fe80::3470:1ff:fe5b:8fde", names[3] + " fe80::284b:5fff:fe94:92b6"})); n.Self != names[0] || !slices.Equal(got, want) {
			t.Errorf("%s: %s has %q, want %q", file, n.Self, got, want)
		}
	}
}

// Truncated names are resolved by the LSP's Hostname. Unresolvable ones are an error.
func TestISISNames(t *testing.T) {
	const fragment = "\naverylonghostn.00-01      194   0x00000003  0xe495    1170    0/0/0\n  MT IPv6 Reachability: fd00:cc::/64 (Metric: 10) ipv6-unicast\n\n    5 LSPs\n"
	n := kept(t, "isis-lan.txt", "\n    5 LSPs\n", fragment)
	last := n.Nodes[n.Node("averylonghostname-in-berlin")]
	if !slices.ContainsFunc(last.Prefixes, func(p netip.Prefix) bool { return p.String() == "fd00:cc::/64" }) {
		t.Errorf("a further fragment is of the LSP before it: %+v", last)
	}
	text, _ := os.ReadFile("testdata/isis-lan.txt")
	for _, c := range []struct{ old, new, want string }{
		{"  Hostname: averylonghostname-in-amsterdam\n", "", "several hostnames begin with averylonghostn"},
		{"averylonghostname-in-berlin", "averylonghostname-in-amsterdam", "0000.0000.0004 and 0000.0000.0003 are both called averylonghostname-in-amsterdam"},
	} {
		if _, err := topo.Read("f", []byte(strings.ReplaceAll(string(text), c.old, c.new))); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, want %q", err, c.want)
		}
	}
}

// End.X SIDs of a LAN are per neighbour, as in the sources of later FRR. Flavours of a behaviour do not matter.
func TestLANSIDs(t *testing.T) {
	reach := "  MT Reachability: 0000.0000.0002.02 (Metric: 10) ipv6-unicast\n  IPv4 Interface Address: 10.77.1.1\n"
	sids := "  MT Reachability: 0000.0000.0002.02 (Metric: 10) ipv6-unicast\n"
	for i := 2; i <= 3; i++ {
		sids += fmt.Sprintf("    SRv6 Lan End.X SID: fc00:1:%x::, Algorithm: SPF, Weight: 0, Endpoint Behavior: uA, Flags: B:0, S:0, P:0 Neighbor-ID: 0000.0000.000%d\n", i, i)
	}
	n := kept(t, "isis-lan.txt", reach, sids, "  Hostname: b\n", "  Hostname: b\n      SRv6 End SID Endpoint Behavior: uN PSP/USD, SID value: fc00:2::\n")
	got := map[string]string{}
	for _, l := range n.Links {
		if n.Nodes[l.From].Name == "a" && l.EndX.IsValid() {
			got[n.Nodes[l.To].Name] = l.EndX.String()
		}
	}
	if len(got) != 2 || got["b"] != "fc00:1:2::" || got["averylonghostname-in-amsterdam"] != "fc00:1:3::" {
		t.Errorf("End.X %v", got)
	}
	if end := n.Nodes[n.Node("b")].End; !end.IsValid() || end.String() != "fc00:2::" {
		t.Errorf("End of b %s", end)
	}
}

// If IPv6 and IPv4 have different topologies, IPv4 is omitted.
func TestTopologiesApart(t *testing.T) {
	four := func(n *topo.Network) (count int) {
		for _, x := range n.Nodes {
			for _, p := range x.Prefixes {
				if p.Addr().Is4() {
					count++
				}
			}
		}
		return count
	}
	if n := kept(t, "isis-lan.txt"); four(n) != 4 || len(n.Notes) != 0 {
		t.Errorf("%d IPv4 prefixes, notes %q", four(n), n.Notes)
	}
	n := kept(t, "isis-lan.txt", "  MT Reachability: 0000.0000.0002.02 (Metric: 10) ipv6-unicast\n  IPv4 Interface Address: 10.77.1.3\n",
		"  MT Reachability: 0000.0000.0002.02 (Metric: 11) ipv6-unicast\n")
	if four(n) != 0 || len(n.Notes) != 1 || !strings.Contains(n.Notes[0], "IPv4 prefixes are omitted") {
		t.Errorf("%d IPv4 prefixes, notes %q", four(n), n.Notes)
	}
}

// Indistinguishable parallel links, as without mpls-te, are paired by metric. Unreachable ones and other topologies
// are omitted.
func TestUntold(t *testing.T) {
	n := kept(t, "isis-lan.txt",
		"  MT Reachability: 0000.0000.0002.02 (Metric: 10) ipv6-unicast\n  IPv4 Interface Address: 10.77.1.1\n",
		"  MT Reachability: 0000.0000.0002.00 (Metric: 7) ipv6-unicast\n  MT Reachability: 0000.0000.0002.00 (Metric: 9) ipv6-unicast\n"+
			"  MT IPv6 Reachability: fd00:dd::/64 (Metric: 4261412865) ipv6-unicast\n  MT IPv6 Reachability: fd00:ee::/64 (Metric: 1) ipv6-mgmt\n",
		"  MT Reachability: 0000.0000.0002.02 (Metric: 10) ipv6-unicast\n  IPv4 Interface Address: 10.77.1.2\n",
		"  MT Reachability: 0000.0000.0001.00 (Metric: 9) ipv6-unicast\n  MT Reachability: 0000.0000.0001.00 (Metric: 7) ipv6-unicast\n")
	pairs := 0
	for i, l := range n.Links {
		if l.LAN == "" {
			if pairs++; n.Links[l.Reverse].Metric != l.Metric {
				t.Errorf("%s goes back with %d, not %d", n.LinkName(i), n.Links[l.Reverse].Metric, l.Metric)
			}
		}
	}
	if pairs != 4 {
		t.Errorf("%d links", pairs)
	}
	if got := fmt.Sprint(n.Nodes[n.Node("a")].Prefixes); strings.Contains(got, "fd00:dd") || strings.Contains(got, "fd00:ee") {
		t.Errorf("a announces %s", got)
	}
}
