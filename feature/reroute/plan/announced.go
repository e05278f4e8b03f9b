// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"net/netip"
	"slices"
)

// Announcers returns the nearest routers announcing a prefix, in the network's order. The distance is the metric of
// the way plus the router's metric of the prefix (RFC 5308 section 2, RFC 5340 section 4.8). A router announcing the
// prefix itself is its own result, because connected routes win.
func (p *Planner) Announcers(from int, prefix netip.Prefix) (nearest []int) {
	if p.announced == nil {
		p.announced = map[netip.Prefix][]int{}
		for i, x := range p.g.Nodes {
			for _, a := range x.Prefixes {
				if a = a.Masked(); !slices.Contains(p.announced[a], i) {
					p.announced[a] = append(p.announced[a], i)
				}
			}
		}
	}
	all := p.announced[prefix.Masked()]
	if slices.Contains(all, from) {
		return []int{from}
	}
	best := uint64(infinite)
	for _, i := range all {
		d := p.Distance(from, i)
		if d >= infinite {
			continue
		}
		if d += uint64(p.g.Nodes[i].Metrics[prefix.Masked()]); d < best {
			best, nearest = d, nearest[:0]
		}
		if d == best {
			nearest = append(nearest, i)
		}
	}
	return nearest
}

// Carries reports whether a repair brings packets for a prefix to a router announcing it. At the end of the segment
// list they follow the routes from before the failure. These may lead to another announcing router, across the
// failure.
func (p *Planner) Carries(of *Plan, r Repair, prefix netip.Prefix) bool {
	at, f := p.released(r), p.g.lay(of.Failures[r.Failure])
	there := p.Announcers(at, prefix)
	return len(there) > 0 && !slices.ContainsFunc(there, func(a int) bool {
		return a != r.Destination && !p.g.safe(int32(at), int32(a), f)
	})
}

// released returns the router continuing with the original packets: see [Repair.SIDs].
func (p *Planner) released(r Repair) int {
	if len(r.Segments) == 0 {
		return p.g.Links[r.Out].To
	}
	nodes, last := p.g.Nodes, r.Segments[len(r.Segments)-1]
	at, off := last.Node, false
	if last.Link >= 0 {
		at, off = p.g.Links[last.Link].To, p.g.Links[last.Link].DX6.IsValid()
	}
	if !off && !nodes[at].DT6.IsValid() && nodes[r.Destination].DT6.IsValid() {
		return r.Destination
	}
	return at
}
