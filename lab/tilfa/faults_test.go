// SPDX-License-Identifier: Apache-2.0

package tilfa

import (
	"math/rand/v2"
	"testing"

	"github.com/weir-project/weir/feature/reroute/plan"
	"github.com/weir-project/weir/feature/reroute/topo"
	"github.com/weir-project/weir/lab/tilfa/sim"
)

// tried returns networks of every kind, small enough for many rounds.
func tried(t *testing.T) []*topo.Network {
	t.Helper()
	var out []*topo.Network
	for i, n := range generated(7) {
		if len(n.Nodes) <= 40 {
			share(n, rand.New(rand.NewPCG(7, uint64(i))))
			out = append(out, n)
		}
	}
	if len(out) < 20 {
		t.Fatalf("only %d networks", len(out))
	}
	return out
}

func plansFor(t *testing.T, n *topo.Network, mode plan.Mode) []*plan.Plan {
	t.Helper()
	plans, err := allPlans(plan.New(n), n, mode)
	if err != nil {
		t.Fatal(err)
	}
	return plans
}

// outcome returns the outcome of every failure of a mode.
func outcome(n *topo.Network, mode plan.Mode, repair sim.Repair) sim.Outcome {
	s := sim.New(n)
	var o sim.Outcome
	for _, f := range failures(n, mode) {
		o.Add(s.Fail(f.Links, f.Node, repair))
	}
	return o
}

// Unmodified plans show no faults.
func TestSound(t *testing.T) {
	for _, n := range tried(t) {
		for _, mode := range plan.Modes() {
			o := outcome(n, mode, planned(plansFor(t, n, mode)))
			if o.Delivered != o.Protectable || o.Loops+o.UsedFault+o.Disturbed > 0 || mode == plan.Link && o.Affected == 0 {
				t.Errorf("%s, %s: %+v", n.Name, mode, o)
			}
		}
	}
}

// The simulator detects each planted fault and its kind. A fault in one segment of one repair may be
// harmless, because the segment was the shortest path but not the only one. The faults are therefore
// planted in all segments.
func TestPlantedFaults(t *testing.T) {
	link := func(n *topo.Network, router int) int {
		for i, l := range n.Links {
			if l.From == router {
				return i
			}
		}
		return -1
	}
	for _, c := range []struct {
		name  string
		plant func(n *topo.Network, r plan.Repair, down int) (plan.Repair, bool) // false: no repair at all
		seen  func(o sim.Outcome) bool
	}{
		{"segments left out", func(_ *topo.Network, r plan.Repair, _ int) (plan.Repair, bool) {
			r.Segments = nil
			return r, true
		}, func(o sim.Outcome) bool { return o.Loops > 0 || o.UsedFault > 0 }},
		{"a repair missing", func(_ *topo.Network, r plan.Repair, _ int) (plan.Repair, bool) {
			return r, r.Destination%3 > 0
		}, func(o sim.Outcome) bool { return o.Delivered < o.Protectable && o.Loops == 0 && o.UsedFault == 0 }},
		{"out over the failed link", func(_ *topo.Network, r plan.Repair, down int) (plan.Repair, bool) {
			r.Out = down
			return r, true
		}, func(o sim.Outcome) bool { return o.UsedFault > 0 && o.Delivered < o.Protectable }},
		{"by the far end of the failed link", func(n *topo.Network, r plan.Repair, down int) (plan.Repair, bool) {
			r.Segments = []plan.Segment{{Node: n.Links[down].To, Link: n.Links[down].Reverse}}
			return r, true
		}, func(o sim.Outcome) bool { return o.UsedFault > 0 }},
		{"back to its origin", func(n *topo.Network, r plan.Repair, _ int) (plan.Repair, bool) {
			// With an End of this router in front, it sends the packet natively, over the failed link.
			r.Segments = append([]plan.Segment{{Node: n.Links[r.Out].From, Link: -1}}, r.Segments...)
			return r, true
		}, func(o sim.Outcome) bool { return o.UsedFault > 0 || o.Loops > 0 }},
		{"another router's adjacency", func(n *topo.Network, r plan.Repair, _ int) (plan.Repair, bool) {
			r.Segments = []plan.Segment{{Node: n.Links[r.Out].To, Link: link(n, n.Links[r.Out].From)}}
			return r, true
		}, func(o sim.Outcome) bool { return o.Delivered == 0 }},
		{"another router's interface", func(n *topo.Network, r plan.Repair, _ int) (plan.Repair, bool) {
			r.Out = link(n, n.Links[r.Out].To)
			return r, true
		}, func(o sim.Outcome) bool { return o.Delivered == 0 }},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, mode := range []plan.Mode{plan.Link, plan.Node} {
				var o sim.Outcome
				for _, n := range tried(t) {
					plans := plansFor(t, n, mode)
					o.Add(outcome(n, mode, func(router, down, destination int) (int, []plan.Segment, bool) {
						r, ok := plans[router].For(down, destination)
						if !ok {
							return 0, nil, false
						}
						bad, ok := c.plant(n, *r, down)
						return bad.Out, bad.Segments, ok
					}))
				}
				if !c.seen(o) {
					t.Errorf("%s: not detected: %+v", mode, o)
				}
			}
		})
	}
}

// In every repair with segments, removing any one segment is a fault. Otherwise the list was not the
// shortest.
func TestNoSegmentTooMany(t *testing.T) {
	checked := 0
	for _, n := range tried(t) {
		s := sim.New(n)
		for _, p := range plansFor(t, n, plan.Link) {
			for _, r := range p.Repairs {
				f := p.Failures[r.Failure]
				for drop := range r.Segments {
					checked++
					fewer := append(append([]plan.Segment(nil), r.Segments[:drop]...), r.Segments[drop+1:]...)
					fate := s.Follow(f.Links, p.Node, r.Destination, r.Out, fewer)
					if fate&sim.Faults == 0 {
						t.Errorf("%s: %s to %s without %s: %v works without segment %d", n.Name, n.Nodes[p.Node].Name,
							n.Nodes[r.Destination].Name, n.LinkName(f.Links[0]), r.Segments, drop)
					}
				}
			}
		}
	}
	if checked < 500 {
		t.Errorf("only %d segments checked", checked)
	}
}

// No list with fewer segments works: the test tries all lists shorter by one, from the first hops of the
// post-convergence paths.
func TestShortest(t *testing.T) {
	checked := 0
	for _, n := range tried(t) {
		s := sim.New(n)
		if len(n.Nodes) > 25 {
			continue
		}
		for _, mode := range []plan.Mode{plan.Link, plan.Node, plan.SRLG} {
			for _, p := range plansFor(t, n, mode) {
				for _, r := range p.Repairs {
					f := p.Failures[r.Failure]
					if len(r.Segments) == 0 || len(r.Segments) > 2 {
						continue
					}
					checked++
					if shorter, ok := s.Search(f.Links, p.Node, r.Destination, len(r.Segments)-1); ok {
						t.Errorf("%s, %s: %s to %s without %s: %v, and %v works", n.Name, mode, n.Nodes[p.Node].Name,
							n.Nodes[r.Destination].Name, n.LinkName(f.Links[0]), r.Segments, shorter)
					}
				}
			}
		}
	}
	if checked < 500 {
		t.Errorf("only %d lists checked", checked)
	}
}
