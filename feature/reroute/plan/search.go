// SPDX-License-Identifier: Apache-2.0

package plan

import "slices"

// search finds the shortest segment lists from one router to all nodes, along the paths of a tree.
//
// It is a dynamic program over the nodes in the order of their distance. A packet is fresh at a node after using up
// its current segment. There it can be sent anywhere. Each node y has two numbers:
//
//	fresh(y)  the segments needed until a packet is fresh at y
//	reach(y)  the segments needed until a packet arrives at y, by a segment or an address of y:
//	          the least fresh(x) of all x with only safe shortest paths to y, including y itself
//
// The router chooses the interface, so its neighbours get packets fresh at no cost. Then
//
//	fresh(y) = 1 + min(reach(y) before y itself counts,   End of y
//	                   reach(z) for a link z→y)           End.X of z, after arriving at z
//
// and a destination needs reach(destination) segments, because its own address is not a segment.
type search struct {
	g     *graph
	t     *tree
	fresh []step
	reach []step
}

// step is the last step of the best list to a node.
type step struct {
	cost uint32 // segments, plus a fraction for each adjacency segment: fewer of these are better
	from int32  // reach: the last node with the packet fresh. fresh: the node reached before
	link int32  // fresh: the first link, or the link of End.X, or none
}

const (
	segment   = 1 << 12 // one segment in step.cost
	adjacency = 1       // surcharge of an adjacency segment
	never     = 1 << 31
	noLink    = -1
)

// search computes the lists along the paths of t to the targets. usesFailed means t is of the whole network, so
// adjacency segments may cross failed links.
func (g *graph) search(t *tree, f *failure, usesFailed bool, targets []int32) *search {
	s := &search{g: g, t: t, fresh: make([]step, len(g.Nodes)), reach: make([]step, len(g.Nodes))}
	for i := range s.fresh {
		s.fresh[i] = step{never, -1, noLink}
		s.reach[i] = step{never, -1, noLink}
	}
	open := func(l int32) bool { return usesFailed || !f.includes(g, l) }
	on := s.towards(targets, open)
	var before []int32
	for _, y := range t.near {
		if y == t.source || !on[y] {
			continue
		}
		for _, x := range before {
			// A packet fresh at an overloaded router would be forwarded by it (ISO 10589 section 7.2.8.1).
			if g.Nodes[x].Overload {
				continue
			}
			if s.fresh[x].cost < s.reach[y].cost && t.dist[x]+g.dist(x, y) == t.dist[y] && g.safe(x, y, f) {
				s.reach[y] = step{s.fresh[x].cost, x, noLink}
			}
		}
		s.arrive(y, open)
		before = append(before, y)
	}
	return s
}

// towards marks the nodes on the tree's paths to the targets.
func (s *search) towards(targets []int32, open func(int32) bool) []bool {
	on := make([]bool, len(s.g.Nodes))
	for _, d := range targets {
		on[d] = true
	}
	for _, y := range slices.Backward(s.t.near) {
		if on[y] {
			for _, l := range s.g.out(y) {
				if in := int32(s.g.Links[l].Reverse); s.shortest(in) && open(in) {
					on[s.g.Links[in].From] = true
				}
			}
		}
	}
	return on
}

// shortest reports whether a link is on a shortest path of the tree.
func (s *search) shortest(link int32) bool {
	l := &s.g.Links[link]
	d := s.t.dist[l.From]
	return d < infinite && d+s.g.cost[link] == s.t.dist[l.To] && (!s.g.Nodes[l.From].Overload || int32(l.From) == s.t.source)
}

// arrive sets fresh(y), and improves reach(y) by it.
func (s *search) arrive(y int32, open func(int32) bool) {
	best := step{never, -1, noLink}
	if s.reach[y].cost < never && (!s.g.useSIDs || s.g.Nodes[y].End.IsValid()) {
		best = step{s.reach[y].cost + segment, y, noLink}
	}
	for _, l := range s.g.out(y) {
		in := int32(s.g.Links[l].Reverse)
		if !open(in) || !s.shortest(in) {
			continue
		}
		z := int32(s.g.Links[in].From)
		switch {
		case z == s.t.source:
			if best.cost > 0 {
				best = step{0, z, in}
			}
		case s.reach[z].cost < never && (!s.g.useSIDs || s.g.Links[in].EndX.IsValid()):
			if c := s.reach[z].cost + segment + adjacency; c < best.cost {
				best = step{c, z, in}
			}
		}
	}
	s.fresh[y] = best
	if best.cost < s.reach[y].cost {
		s.reach[y] = step{best.cost, y, noLink}
	}
}

// list returns the best way to a node: the first link and the segments after it.
func (s *search) list(d int32) (first int, segments []Segment, ok bool) {
	if s.reach[d].cost >= never {
		return 0, nil, false
	}
	for at := d; ; {
		x := s.reach[at].from
		how := s.fresh[x]
		if how.from == s.t.source {
			slices.Reverse(segments)
			return int(how.link), segments, true
		}
		if how.link == noLink {
			segments = append(segments, Segment{int(x), -1})
			// reach(x) before x itself counted is unchanged, because fresh(x) is more.
		} else {
			segments = append(segments, Segment{int(how.from), int(how.link)})
		}
		at = how.from
	}
}
