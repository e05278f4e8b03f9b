// SPDX-License-Identifier: Apache-2.0

package plan_test

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/reroute/plan"
	"github.com/weir-project/weir/feature/reroute/topo"
)

// network builds a network from links such as "ab1 bc2", with metrics, and announcers of a prefix, with metrics: "b10
// c0".
func network(t *testing.T, links, announcers string, groups ...string) (*topo.Network, netip.Prefix) {
	t.Helper()
	p := netip.MustParsePrefix("2001:db8::/64")
	b := topo.NewBuilder("anycast")
	each := func(text string, f func(a, b string, metric uint32)) {
		for _, word := range strings.Fields(text) {
			names := strings.TrimRight(word, "0123456789")
			metric, err := strconv.ParseUint(word[len(names):], 10, 32)
			if err != nil {
				t.Fatal(err)
			}
			f(names[:1], names[len(names)-1:], uint32(metric))
		}
	}
	var made []int
	each(links, func(x, y string, metric uint32) { made = append(made, b.Cable(b.Node(x), b.Node(y), metric)) })
	each(announcers, func(x, _ string, metric uint32) { b.Announce(b.Node(x), p, metric) })
	n, err := b.Network()
	if err != nil {
		t.Fatal(err)
	}
	for i, l := range made {
		if i < len(groups) && groups[i] != "" {
			n.Links[l].SRLGs, n.Links[l+1].SRLGs = []string{groups[i]}, []string{groups[i]}
		}
	}
	return n, p
}

// Packets for a prefix go to its nearest announcer, by the metrics of the way and of the prefix.
func TestAnnouncers(t *testing.T) {
	for announcers, want := range map[string]string{
		"b10 c0": "[c]", "b0 c0": "[b]", "b1 c0": "[b c]", "a9 b0": "[a]", "d0": "[]", "d0 c90": "[c]", "": "[]",
	} {
		n, p := network(t, "ab1 bc1 de1", announcers)
		var got []string
		for _, i := range plan.New(n).Announcers(0, p) {
			got = append(got, n.Nodes[i].Name)
		}
		if fmt.Sprint(got) != want {
			t.Errorf("%q: %v, want %s", announcers, got, want)
		}
	}
}

// A repair ends at x. A router nearer to x than the destination has the prefix too, but is behind a link failing as
// well.
func TestCarries(t *testing.T) {
	for announcers, want := range map[string]bool{"c0": true, "c0 e0": false, "c0 e1": false, "c0 e2": true, "c0 e0 x0": true} {
		n, p := network(t, "sn1 nc1 sx5 xc2 xe1 ec9", announcers, "duct", "", "", "", "duct")
		x := plan.New(n)
		got, err := x.Plan(n.Node("s"), plan.Options{Mode: plan.SRLG})
		if err != nil {
			t.Fatal(err)
		}
		r, ok := got.For(0, n.Node("c"))
		if !ok || len(r.Segments) > 0 || n.Nodes[n.Links[r.Out].To].Name != "x" {
			t.Fatalf("%+v", got)
		}
		if carries := x.Carries(got, *r, p); carries != want {
			t.Errorf("%q: %v", announcers, carries)
		}
	}
}
