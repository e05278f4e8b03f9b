// SPDX-License-Identifier: Apache-2.0

package sim

import "github.com/weir-project/weir/feature/reroute/plan"

// walk follows the packets for one destination at a time.
type walk struct {
	*Network
	down      []bool
	repair    Repair
	connected func(a, b int) bool // after the failure; nil if unused

	to     int
	fates  []Fate // of unrepaired packets, by their router
	colour []uint8
	lists  map[int]*listWalk // of repaired packets, by their failed link
}

const (
	white = iota // not seen
	grey         // being followed: meeting it again is a loop
	black        // done
)

func (w *walk) begin(to int) {
	w.to = to
	w.fates = make([]Fate, len(w.n.Nodes))
	w.colour = make([]uint8, len(w.n.Nodes))
	w.lists = map[int]*listWalk{}
}

// plain returns the fate of an unrepaired packet at a router.
func (w *walk) plain(at int) Fate {
	switch {
	case at == w.to:
		return Arrived
	case w.colour[at] == grey:
		return Looped
	case w.colour[at] == black:
		return w.fates[at]
	}
	w.colour[at] = grey
	var fate Fate
	hops := w.nextHops(nil, at, w.to)
	if len(hops) == 0 {
		fate = Stranded
	}
	for _, l := range hops {
		if w.down[l] {
			fate |= w.repaired(at, l)
		} else {
			fate |= w.plain(w.n.Links[l].To)
		}
	}
	w.colour[at], w.fates[at] = black, fate
	return fate
}

// repaired returns the fate of a packet with its link down.
func (w *walk) repaired(at, link int) Fate {
	if known, ok := w.lists[link]; ok {
		return known.fate
	}
	out, segments, ok := w.repair(at, link, w.to)
	if !ok {
		if w.connected != nil && !w.connected(at, w.to) {
			return CutOff
		}
		return NoRepair
	}
	l := &listWalk{walk: w, segments: segments, colour: make([]uint8, len(w.n.Nodes)*(len(segments)+1)), known: make([]Fate, len(w.n.Nodes)*(len(segments)+1))}
	w.lists[link] = l
	l.fate = Repaired
	switch {
	case out < 0 || out >= len(w.n.Links) || w.n.Links[out].From != at:
		l.fate |= Stranded
	case w.down[out]:
		l.fate |= UsedFault
	default:
		l.fate |= l.at(w.n.Links[out].To, 0)
	}
	return l.fate
}

// listWalk follows packets with one segment list.
type listWalk struct {
	*walk
	segments []plan.Segment
	colour   []uint8
	known    []Fate
	fate     Fate
}

// at returns the fate of a packet at a router, with segments from i on left.
func (l *listWalk) at(node, i int) Fate {
	state := i*len(l.n.Nodes) + node
	switch l.colour[state] {
	case grey:
		return Looped
	case black:
		return l.known[state]
	}
	l.colour[state] = grey
	fate := l.process(node, i)
	l.colour[state], l.known[state] = black, fate
	return fate
}

func (l *listWalk) process(node, i int) Fate {
	target := l.to
	if i < len(l.segments) {
		s := l.segments[i]
		if s.Node < 0 || s.Node >= len(l.n.Nodes) {
			return Stranded
		}
		if s.Node == node {
			return l.endpoint(node, i)
		}
		target = s.Node
	} else if node == l.to {
		return Arrived
	}
	hops := l.nextHops(nil, node, target)
	if len(hops) == 0 {
		return Stranded
	}
	var fate Fate
	for _, hop := range hops {
		if l.down[hop] {
			fate |= UsedFault
		} else {
			fate |= l.at(l.n.Links[hop].To, i)
		}
	}
	return fate
}

// endpoint is End, a lookup of the next segment, or End.X, a send over its link (RFC 8986 sections 4.1,
// 4.2).
func (l *listWalk) endpoint(node, i int) Fate {
	s := l.segments[i]
	switch {
	case s.Link < 0:
		return l.at(node, i+1)
	case s.Link >= len(l.n.Links) || l.n.Links[s.Link].From != node:
		return Stranded
	case l.down[s.Link]:
		return UsedFault
	}
	return l.at(l.n.Links[s.Link].To, i+1)
}
