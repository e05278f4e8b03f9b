// SPDX-License-Identifier: Apache-2.0

package tilfa

import (
	"fmt"
	"math/rand/v2"

	"github.com/weir-project/weir/feature/reroute/plan"
	"github.com/weir-project/weir/feature/reroute/topo"
	"github.com/weir-project/weir/lab/tilfa/sim"
)

// All orders are tried with up to maxNodes changed routers. With more, drawn random ones are tried.
const (
	maxNodes = 9
	drawn    = 300
)

// orders calls f with routers in one of two stages, in every combination. These are the moments of every
// order of changes from one stage to the other.
func orders(changed []int, nodes int, from, to sim.Stage, r *rand.Rand, f func([]sim.Stage)) {
	count := drawn
	if len(changed) <= maxNodes {
		count = 1 << len(changed)
	}
	for k := range count {
		stages := make([]sim.Stage, nodes)
		for i := range stages {
			stages[i] = from
		}
		set := uint64(k)
		if len(changed) > maxNodes {
			set = r.Uint64()
		}
		for i, router := range changed {
			if set>>i&1 == 1 {
				stages[router] = to
			}
		}
		f(stages)
	}
}

// changing returns a network during a failure or its end, with all detours.
func changing(n *topo.Network, p *plan.Planner, f plan.Failure, up bool) (*sim.Change, sim.Detours) {
	all := map[[2]int]plan.Detour{}
	for router := range n.Nodes {
		detours, _ := p.Detours(router, f, up)
		for _, d := range detours {
			all[[2]int{router, d.Destination}] = d
		}
	}
	return sim.NewChange(n, f.Links, f.Node, up), func(router, destination int) (int, []plan.Segment, bool) {
		d, ok := all[[2]int{router, destination}]
		return d.Out, d.Segments, ok
	}
}

// loopsIn counts the moments in which a packet does not arrive.
func loopsIn(n *topo.Network, c *sim.Change, detours sim.Detours, from, to sim.Stage, r *rand.Rand) (moments, lost int) {
	for d := range n.Nodes {
		changed := c.Changed(d)
		if len(changed) == 0 {
			continue
		}
		orders(changed, len(n.Nodes), from, to, r, func(stages []sim.Stage) {
			for source := range n.Nodes {
				if source == d || !c.Reachable(source, d) {
					continue
				}
				moments++
				if fate := c.Forward(source, d, stages, detours); fate&sim.Faults != 0 || fate&sim.Arrived == 0 {
					lost++
				}
			}
		})
	}
	return moments, lost
}

// spreading holds the fates of packets while changes spread.
type spreading struct {
	moments  int          // packets, in all moments of all orders
	lost     int          // lost packets, with detours
	unstaged map[bool]int // without detours, at a failure and at its end
	examples []string
}

// spread tries every order in which routers learn of every failure of a network, and of its end.
func spread(n *topo.Network, r *rand.Rand, s *spreading) {
	p := plan.New(n)
	for _, mode := range []plan.Mode{plan.Link, plan.Node} {
		for _, f := range failures(n, mode) {
			for _, up := range []bool{false, true} {
				c, detours := changing(n, p, f, up)
				for _, stage := range []sim.Stage{sim.Before, sim.OnDetour} {
					m, lost := loopsIn(n, c, detours, stage, stage+1, r)
					s.moments += m
					if s.lost += lost; lost > 0 && len(s.examples) < 5 {
						s.examples = append(s.examples, fmt.Sprintf("%s, up %v, from stage %d: %d of %d lost", say(n, f), up, stage, lost, m))
					}
				}
				_, lost := loopsIn(n, c, detours, sim.Before, sim.After, r)
				s.unstaged[up] += lost
			}
		}
	}
}
