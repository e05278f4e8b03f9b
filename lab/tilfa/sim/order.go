// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"slices"

	"github.com/weir-project/weir/feature/reroute/plan"
	"github.com/weir-project/weir/feature/reroute/topo"
)

// Stage is a router's progress during a change.
type Stage uint8

const (
	Before   Stage = iota // the old table; next to a failure it repairs
	OnDetour              // a detour where one exists, the old table elsewhere
	After                 // the new table
)

// Change is a network during a failure or its end.
type Change struct {
	n        *topo.Network
	old, new *Network
	down     []bool // unusable links, in a failure
	node     int    // the failing or returning router, or -1
	up       bool
}

// NewChange prepares a change: links and perhaps a node fail, or with up, return.
func NewChange(n *topo.Network, links []int, node int, up bool) *Change {
	c := &Change{n: n, old: tables(n, nil), down: make([]bool, len(n.Links)), node: node, up: up}
	without := make([]bool, len(n.Links))
	for _, l := range links {
		without[l] = true
	}
	c.new = tables(n, without)
	if up {
		c.old, c.new = c.new, c.old
	} else {
		c.down = without
	}
	return c
}

// Changed lists the routers with other links for a destination after the change.
func (c *Change) Changed(destination int) (out []int) {
	for r := range c.n.Nodes {
		if r != destination && r != c.node && !slices.Equal(c.old.nextHops(nil, r, destination), c.new.nextHops(nil, r, destination)) {
			out = append(out, r)
		}
	}
	return out
}

// Reachable reports whether a destination has a path from a source before and after.
func (c *Change) Reachable(source, destination int) bool {
	return c.old.dist[source][destination] < unreachable && c.new.dist[source][destination] < unreachable
}

// Detours returns a router's action in stage OnDetour, and for packets with their link down.
type Detours func(router, destination int) (out int, segments []plan.Segment, ok bool)

// Forward returns the fate of packets with each router in the given stage.
func (c *Change) Forward(source, destination int, stages []Stage, detours Detours) Fate {
	w := &changing{Change: c, to: destination, stages: stages, detours: detours, colour: make([]uint8, len(c.n.Nodes)), fates: make([]Fate, len(c.n.Nodes))}
	return w.plain(source)
}

type changing struct {
	*Change
	to      int
	stages  []Stage
	detours Detours
	colour  []uint8
	fates   []Fate
}

func (w *changing) plain(at int) Fate {
	switch {
	case at == w.to:
		return Arrived
	case w.colour[at] == grey:
		return Looped
	case w.colour[at] == black:
		return w.fates[at]
	}
	w.colour[at] = grey
	fate := w.decide(at)
	w.colour[at], w.fates[at] = black, fate
	return fate
}

func (w *changing) decide(at int) Fate {
	table := w.old
	switch {
	case w.stages[at] == After, w.up && at == w.node: // a returning node knows the current network
		table = w.new
	case w.stages[at] == OnDetour:
		if out, segments, ok := w.detours(at, w.to); ok {
			return w.list(at, out, segments)
		}
	}
	hops := table.nextHops(nil, at, w.to)
	if len(hops) == 0 {
		return Stranded
	}
	var fate Fate
	for _, l := range hops {
		if !w.down[l] {
			fate |= w.plain(w.n.Links[l].To)
			continue
		}
		out, segments, ok := w.detours(at, w.to)
		if !ok {
			return NoRepair
		}
		fate |= w.list(at, out, segments)
	}
	return fate
}

// list follows a packet with segments. No router may have a detour for the segments' routers. Routers on
// the path may use the old or the new table: both are followed, at every hop.
func (w *changing) list(at, out int, segments []plan.Segment) Fate {
	if w.n.Links[out].From != at {
		return Stranded
	}
	if w.down[out] {
		return UsedFault
	}
	at = w.n.Links[out].To
	fate := Repaired
	for _, s := range segments {
		fate |= w.towards(at, s.Node, map[int]bool{})
		if fate&Faults != 0 {
			return fate
		}
		if at = s.Node; s.Link >= 0 {
			if w.down[s.Link] || w.n.Links[s.Link].From != at {
				return fate | UsedFault
			}
			at = w.n.Links[s.Link].To
		}
	}
	return fate | w.towards(at, w.to, map[int]bool{})
}

func (w *changing) towards(at, to int, seen map[int]bool) Fate {
	if at == to {
		return Arrived
	}
	if seen[at] {
		return Looped
	}
	if _, _, ok := w.detours(at, to); ok {
		return Stranded // the segment depends on the progress of the change
	}
	seen[at] = true
	defer delete(seen, at)
	hops := w.new.nextHops(w.old.nextHops(nil, at, to), at, to)
	if len(hops) == 0 {
		return Stranded
	}
	var fate Fate
	for _, l := range hops {
		if w.down[l] {
			return UsedFault
		}
		fate |= w.towards(w.n.Links[l].To, to, seen)
	}
	return fate
}
