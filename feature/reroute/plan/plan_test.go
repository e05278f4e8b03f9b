// SPDX-License-Identifier: Apache-2.0

package plan_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/reroute/plan"
	"github.com/weir-project/weir/feature/reroute/topo"
)

func read(t testing.TB, text string) *topo.Network {
	t.Helper()
	n, err := topo.Read("network", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// square is a ring of four with one node behind it:
//
//	a 1 b 1 c
//	1       1
//	d - 9 - e
const square = `nodes: [{name: a}, {name: b}, {name: c}, {name: d}, {name: e}]
links:
  - {from: a, to: b}
  - {from: b, to: c}
  - {from: c, to: e}
  - {from: a, to: d}
  - {from: d, to: e, metric: 9}
`

func describe(n *topo.Network, p *plan.Plan) string {
	var b strings.Builder
	for _, r := range p.Repairs {
		fmt.Fprintf(&b, "%s without %s: out %s %s cost %d\n", n.Nodes[r.Destination].Name, p.Failures[r.Failure].Name(n),
			n.LinkName(r.Out), plan.ListName(n, r.Segments), r.Metric)
	}
	for _, u := range p.Unprotected {
		fmt.Fprintf(&b, "%s without %s: %s\n", n.Nodes[u.Destination].Name, p.Failures[u.Failure].Name(n), u.Reason)
	}
	return b.String()
}

func TestPlans(t *testing.T) {
	lan := strings.ReplaceAll(square, "from: a, to: b}", "from: a, to: b, lan: hall}\n  - {from: a, to: c, lan: hall, metric: 2}")
	for _, c := range []struct {
		name, network, node string
		options             plan.Options
		want                string
	}{
		// d would send packets for b back to a: its way over e costs more. So the link to e is forced.
		{"link", square, "a", plan.Options{Mode: plan.Link}, `b without a→b: out a→d d→e cost 12
c without a→b: out a→d d→e cost 11
e without a→b: out a→d d→e cost 10
d without a→d: out a→b e→d cost 12
`},
		{"node", square, "a", plan.Options{Mode: plan.Node}, `c without node b: out a→d d→e cost 11
e without node b: out a→d d→e cost 10
b without node b: the destination fails
d without node d: the destination fails
`},
		{"fallback", square, "a", plan.Options{Mode: plan.Node, Fallback: true}, `c without node b: out a→d d→e cost 11
e without node b: out a→d d→e cost 10
b without a→b: out a→d d→e cost 12
d without a→d: out a→b e→d cost 12
`},
		{"bridge", strings.ReplaceAll(square, "  - {from: d, to: e, metric: 9}\n", ""), "a", plan.Options{Mode: plan.Link}, `b without a→b: cut
c without a→b: cut
e without a→b: cut
d without a→d: cut
`},
		// The other way over the LAN uses the same interface.
		{"lan", lan, "a", plan.Options{Mode: plan.Link}, `b without a→b: out a→d d→e cost 12
c without a→b: out a→d d→e cost 11
e without a→b: out a→d d→e cost 10
d without a→d: out a→b e→d cost 12
`},
		// The parallel link takes over. b's own table could use both, but b is not on the way back.
		{"parallel", strings.ReplaceAll(square, "from: a, to: b}", "from: a, to: b}\n  - {from: a, to: b, metric: 3}"), "a", plan.Options{Mode: plan.Link},
			`b without a→b #1: out a→b #2  cost 3
c without a→b #1: out a→b #2  cost 4
e without a→b #1: out a→b #2  cost 5
d without a→d: out a→b #1 e→d cost 12
`},
		// An End.X over the second of two equal links: End cannot select it.
		{"risk", strings.NewReplacer("from: a, to: b}", "from: a, to: b, srlg: [duct]}", "from: d, to: e, metric: 9}",
			"from: d, to: e, metric: 9, srlg: [duct]}\n  - {from: d, to: e, metric: 12}").Replace(square), "a", plan.Options{Mode: plan.SRLG},
			`b without a→b and its risk group duct: out a→d d→e #2 cost 15
c without a→b and its risk group duct: out a→d d→e #2 cost 14
e without a→b and its risk group duct: out a→d d→e #2 cost 13
d without a→d: out a→b e→d #1 cost 12
`},
		// Only d has a SID, so b and c have no repair.
		{"missing SIDs", strings.ReplaceAll(square, "{name: d}", "{name: d, end: fc00:d::1}"), "a", plan.Options{Mode: plan.Link},
			`b without a→b: SIDs are missing for it
c without a→b: SIDs are missing for it
e without a→b: SIDs are missing for it
d without a→d: SIDs are missing for it
`},
		// No path goes through d, even if packets could.
		{"overload", strings.ReplaceAll(square, "{name: d}", "{name: d, overload: true}"), "a", plan.Options{Mode: plan.Link}, `d without a→d: out a→b e→d cost 12
b without a→b: cut
c without a→b: cut
e without a→b: cut
`},
	} {
		n := read(t, c.network)
		p, err := plan.New(n).Plan(n.Node(c.node), c.options)
		if err != nil {
			t.Fatal(err)
		}
		if got := describe(n, p); got != c.want {
			t.Errorf("%s: got\n%s\nwant\n%s", c.name, got, c.want)
		}
	}
}

// TestOverloadIsNotPassed ties a way through an overloaded router with the post-failure way. The router is a
// segment's end, the start of an adjacency segment, or the neighbor without a segment. It stays a destination.
func TestOverloadIsNotPassed(t *testing.T) {
	for name, c := range map[string]struct {
		links string
		want  string
	}{
		"segment":   {"[{from: s, to: d, metric: 1}, {from: s, to: a, metric: 2}, {from: a, to: o, metric: 2}, {from: o, to: d, metric: 1}, {from: a, to: d, metric: 3}]", "d without s→d: out s→a a→d cost 5\n"},
		"neighbor":  {"[{from: s, to: d, metric: 1}, {from: s, to: o, metric: 2}, {from: o, to: d, metric: 2}, {from: s, to: a, metric: 2}, {from: a, to: d, metric: 2}]", "d without s→d: out s→a  cost 4\n"},
		"adjacency": {"[{from: s, to: d, metric: 1}, {from: s, to: a, metric: 1}, {from: a, to: o, metric: 1}, {from: o, to: b, metric: 9}, {from: a, to: b, metric: 10}, {from: b, to: d, metric: 1}]", "d without s→d: out s→a a→b cost 12\n"},
	} {
		n := read(t, "nodes: [{name: s}, {name: a}, {name: b}, {name: o, overload: true}, {name: d}]\nlinks: "+c.links+"\n")
		p, err := plan.New(n).Plan(n.Node("s"), plan.Options{Mode: plan.Link})
		if err != nil {
			t.Fatal(err)
		}
		if got := describe(n, p); !strings.Contains(got, c.want) {
			t.Errorf("%s: got\n%s\nwant\n%s", name, got, c.want)
		}
		for i := range n.Nodes {
			r, ok := p.For(0, i)
			if !ok {
				continue
			}
			for _, x := range r.Segments {
				if n.Nodes[x.Node].Overload && n.Nodes[i].Name != "o" {
					t.Errorf("%s: %s is repaired over the overloaded router: %s", name, n.Nodes[i].Name, plan.ListName(n, r.Segments))
				}
			}
		}
	}
}

// A segment is unusable if one of its equal paths meets the failure.
func TestEqualPaths(t *testing.T) {
	n := read(t, `nodes: [{name: s}, {name: f}, {name: x}, {name: y}, {name: d}]
links:
  - {from: s, to: f, metric: 1}
  - {from: f, to: d, metric: 1}
  - {from: s, to: x, metric: 1}
  - {from: x, to: y, metric: 1}
  - {from: y, to: d, metric: 2}
`)
	p, err := plan.New(n).Plan(n.Node("s"), plan.Options{Mode: plan.Link})
	if err != nil {
		t.Fatal(err)
	}
	r, ok := p.For(0, n.Node("d"))
	if !ok {
		t.Fatal("d has no repair")
	}
	// x has two ways of cost 3 to d, one back over s: so the list must name y.
	if got := plan.ListName(n, r.Segments); got != "y" {
		t.Errorf("segments %q, want y", got)
	}
}

// random returns a connected network with many equal distances.
func random(nodes int, r *rand.Rand) *topo.Network {
	b := topo.NewBuilder("random")
	for i := range nodes {
		b.Node(fmt.Sprint(i))
	}
	for i := 1; i < nodes; i++ {
		b.Cable(i, r.IntN(i), 1+r.Uint32N(4))
	}
	for range nodes * 3 / 2 {
		if i, j := r.IntN(nodes), r.IntN(nodes); i != j {
			b.Link(topo.Link{From: i, To: j, Metric: 1 + r.Uint32N(4)}, topo.Link{Metric: 1 + r.Uint32N(4)})
		}
	}
	n, err := b.Network()
	if err != nil {
		panic(err)
	}
	return n
}

// The metric of a repair equals the distance without the failed links by another algorithm (Bellman and Ford's). This
// verifies the incremental shortest paths.
func TestMetrics(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	checked := 0
	for range 30 {
		n := random(3+r.IntN(25), r)
		p := plan.New(n)
		for _, mode := range plan.Modes() {
			for node := range n.Nodes {
				pl, err := p.Plan(node, plan.Options{Mode: mode})
				if err != nil {
					t.Fatal(err)
				}
				for _, repair := range pl.Repairs {
					want := bellmanFord(n, pl.Failures[repair.Failure].Links, node)[repair.Destination]
					if float64(repair.Metric) != want {
						t.Errorf("%s from %d to %d: %d, want %v", mode, node, repair.Destination, repair.Metric, want)
					}
					checked++
				}
				for _, u := range pl.Unprotected {
					if d := bellmanFord(n, pl.Failures[u.Failure].Links, node)[u.Destination]; !math.IsInf(d, 1) {
						t.Errorf("%s from %d to %d: %s, and there is a path of %v", mode, node, u.Destination, u.Reason, d)
					}
				}
			}
		}
	}
	if checked < 5000 {
		t.Errorf("only %d repairs", checked)
	}
}

func bellmanFord(n *topo.Network, down []int, from int) []float64 {
	d := slices.Repeat([]float64{math.Inf(1)}, len(n.Nodes))
	d[from] = 0
	for range n.Nodes {
		for i, l := range n.Links {
			if !slices.Contains(down, i) {
				d[l.To] = min(d[l.To], d[l.From]+float64(l.Metric))
			}
		}
	}
	return d
}

// BenchmarkPlan computes one router's plan for its links in a network of a thousand routers, without cached paths.
func BenchmarkPlan(b *testing.B) {
	n := random(1000, rand.New(rand.NewPCG(1, 2)))
	for i := 0; b.Loop(); i++ {
		if _, err := plan.New(n).Plan(i%len(n.Nodes), plan.Options{Mode: plan.Link}); err != nil {
			b.Fatal(err)
		}
	}
}
