// SPDX-License-Identifier: Apache-2.0

package sim

import "github.com/weir-project/weir/feature/reroute/plan"

// Follow returns the fate of a packet repaired by a router with the given list, after links have failed.
func (s *Network) Follow(links []int, router, destination, out int, segments []plan.Segment) Fate {
	w := s.without(links)
	w.begin(destination)
	w.repair = func(int, int, int) (int, []plan.Segment, bool) { return out, segments, true }
	return w.repaired(router, links[0])
}

func (s *Network) without(links []int) *walk {
	w := &walk{Network: s, down: make([]bool, len(s.n.Links))}
	for _, l := range links {
		w.down[l] = true
	}
	return w
}

// Search tries every list of length segments, behind every link of the router. It searches one leading
// packets to the destination only on post-convergence paths. Use it for small networks and short lists.
func (s *Network) Search(links []int, router, destination, length int) (found []plan.Segment, ok bool) {
	w := s.without(links)
	after := distances(s.n, w.down)
	// A list costs as much as its path: lists off the post-convergence paths cost more than after.
	for _, out := range s.links[router] {
		l := s.n.Links[out]
		if w.down[out] || int64(l.Metric)+after[l.To][destination] != after[router][destination] {
			continue
		}
		if found, ok := s.extend(links, after, router, destination, out, nil, length); ok {
			return found, true
		}
	}
	return nil, false
}

func (s *Network) extend(links []int, after [][]int64, router, destination, out int, list []plan.Segment, left int) ([]plan.Segment, bool) {
	if left == 0 {
		if s.length(router, destination, out, list) != after[router][destination] {
			return nil, false
		}
		return list, s.Follow(links, router, destination, out, list)&Faults == 0
	}
	for i := range s.n.Nodes {
		try := append(append([]plan.Segment(nil), list...), plan.Segment{Node: i, Link: -1})
		if found, ok := s.extend(links, after, router, destination, out, try, left-1); ok {
			return found, true
		}
	}
	for i, l := range s.n.Links {
		try := append(append([]plan.Segment(nil), list...), plan.Segment{Node: l.From, Link: i})
		if found, ok := s.extend(links, after, router, destination, out, try, left-1); ok {
			return found, true
		}
	}
	return nil, false
}

// length returns the cost of a packet's path by a list, in metrics.
func (s *Network) length(router, destination, out int, list []plan.Segment) int64 {
	at := s.n.Links[out].To
	sum := int64(s.n.Links[out].Metric)
	for _, seg := range list {
		sum += s.dist[at][seg.Node]
		at = seg.Node
		if seg.Link >= 0 {
			sum += int64(s.n.Links[seg.Link].Metric)
			at = s.n.Links[seg.Link].To
		}
	}
	return sum + s.dist[at][destination]
}
