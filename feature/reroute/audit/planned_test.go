// SPDX-License-Identifier: Apache-2.0

package audit_test

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/weir-project/weir/feature/reroute/audit"
	"github.com/weir-project/weir/feature/reroute/plan"
	"github.com/weir-project/weir/feature/reroute/topo"
)

// The plan for a prefix is for the nearest announcer including the prefix's metric. The router's own prefixes have
// none.
func TestPlannedByMetric(t *testing.T) {
	p := netip.MustParsePrefix("2001:db8::/64")
	for _, c := range []struct {
		metrics map[string]uint32
		want    []string
	}{
		{map[string]uint32{"b": 10, "c": 0}, []string{"a→c: a→b"}},
		{map[string]uint32{"b": 1, "c": 9}, []string{"a→b: a→c"}},
		{map[string]uint32{"b": 2, "c": 1}, []string{"a→b: a→c", "a→c: a→b"}},
		{map[string]uint32{"a": 9, "b": 0}, nil},
	} {
		b := topo.NewBuilder("triangle")
		b.Cable(b.Node("a"), b.Node("b"), 1)
		b.Cable(b.Node("a"), b.Node("c"), 2)
		b.Cable(b.Node("b"), b.Node("c"), 2)
		for name, metric := range c.metrics {
			b.Announce(b.Node(name), p, metric)
		}
		n, err := b.Network()
		if err != nil {
			t.Fatal(err)
		}
		n.Self = "a"
		a, err := plan.Ask(n, plan.Question{Node: "a", Options: plan.Options{Mode: plan.Link}})
		if err != nil {
			t.Fatal(err)
		}
		if got := audit.PlannedFor(n, a, p); !slices.Equal(got, c.want) {
			t.Errorf("%v: %q, want %q", c.metrics, got, c.want)
		}
	}
}
