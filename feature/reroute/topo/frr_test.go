// SPDX-License-Identifier: Apache-2.0

package topo_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/reroute/frrtest"
	"github.com/weir-project/weir/feature/reroute/topo"
	"github.com/weir-project/weir/internal/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// The output of real isisd and ospf6d describes the network: parallel links, a LAN, and different metrics per
// direction.
func TestFRR(t *testing.T) {
	frrtest.Need(t, "isisd", "ospf6d")
	n := frrtest.NewNet(t, "a", "b", "c", "d")
	p := func(name string, metric int) frrtest.Port { return frrtest.Port{Name: name, Metric: metric} }
	n.Cable("a", p("b0", 10), "b", p("a0", 10))
	n.Cable("a", p("b1", 15), "b", p("a1", 15))
	n.Cable("b", frrtest.Port{Name: "c0", Metric: 10, Broadcast: true}, "c", frrtest.Port{Name: "b0", Metric: 10, Broadcast: true})
	n.Cable("c", p("d0", 30), "d", p("c0", 20))
	n.Cable("d", p("a0", 10), "a", p("d0", 10))
	routers := n.Start()

	want := []string{"a-b 10", "a-b 15", "a-d 10", "b-a 10", "b-a 15", "b-c 10 LAN", "c-b 10 LAN", "c-d 30", "d-a 10", "d-c 20"}
	check := func(protocol string, name func(string) string, read func() (*topo.Network, error)) *topo.Network {
		var got []string
		var err error
		var network *topo.Network
		nstest.Within(t, 3*time.Minute, func() error {
			if network, err = read(); err != nil {
				return err
			}
			if got = links(network, name); slices.Equal(got, want) && !without(network) && named(network) {
				return nil
			}
			return fmt.Errorf("%s: links %q, want %q; notes %q", protocol, got, want, network.Notes)
		})
		return network
	}
	byName := func(s string) string { return s }
	isis := check("isis", byName, func() (*topo.Network, error) {
		return topo.Read("isis", []byte(routers[0].Vtysh("show isis hostname", "show isis neighbor detail", "show isis database detail")))
	})
	byID := func(s string) string { return string("abcd"[s[len(s)-1]-'1']) }
	ospf6 := check("ospf6", byID, func() (*topo.Network, error) {
		return topo.Read("ospf6", []byte(routers[0].Vtysh("show ipv6 ospf6 database detail json")))
	})
	// The queried router knows its own interfaces, so it distinguishes parallel links.
	for _, x := range []*topo.Network{isis, ospf6} {
		var mine []string
		for i, l := range x.Links {
			if x.Nodes[l.From].Name == x.Self {
				mine = append(mine, fmt.Sprintf("%s %d", l.Interface, l.Metric))
				if back := x.Links[l.Reverse]; back.Metric != l.Metric || back.From != l.To {
					t.Errorf("%s goes back by %s", x.LinkName(i), x.LinkName(l.Reverse))
				}
			}
		}
		slices.Sort(mine)
		if got := strings.Join(mine, ", "); got != "b0 10, b1 15, d0 10" {
			t.Errorf("%s: interfaces of %s: %s", x.Name, x.Self, got)
		}
	}
	for _, x := range []*topo.Network{isis, ospf6} {
		for i, node := range x.Nodes {
			if name := byName(node.Name); !slices.ContainsFunc(node.Prefixes, func(p netip.Prefix) bool { return p.Addr() == frrtest.Loopback(i) }) {
				t.Errorf("%s: %s announces %v, without %s", x.Name, name, node.Prefixes, frrtest.Loopback(i))
			}
		}
	}
	// isisd's JSON is rejected, because it keeps one adjacency of several.
	if _, err := topo.Read("isis", []byte(routers[0].Vtysh("show isis database detail json"))); err == nil || !strings.Contains(err.Error(), topo.ISISCommand) {
		t.Errorf("isisd's JSON: %v", err)
	}
}

// without reports whether a router does not announce everything yet.
func without(n *topo.Network) bool {
	for i, x := range n.Nodes {
		if len(x.Prefixes) < 3 || !slices.ContainsFunc(x.Prefixes, func(p netip.Prefix) bool { return p.Addr() == frrtest.Loopback(i) }) {
			return true
		}
	}
	return false
}

// named reports whether the queried router knows its interfaces by its neighbours.
func named(n *topo.Network) bool {
	return !slices.ContainsFunc(n.Links, func(l topo.Link) bool { return n.Nodes[l.From].Name == n.Self && l.Interface == "" })
}

func links(n *topo.Network, name func(string) string) []string {
	var out []string
	for _, l := range n.Links {
		s := fmt.Sprintf("%s-%s %d", name(n.Nodes[l.From].Name), name(n.Nodes[l.To].Name), l.Metric)
		if l.LAN != "" {
			s += " LAN"
		}
		out = append(out, s)
	}
	slices.Sort(out)
	return out
}
