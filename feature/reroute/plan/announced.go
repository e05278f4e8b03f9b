// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"net/netip"
	"slices"
)

// Announcers are the routers to which one sends packets for a prefix, in the order of the network's: of those that announce it the
// nearest, by the way there and their metric of it (RFC 5308 section 2, RFC 5340 section 4.8). A router that announces it itself sends
// them to no other: what is connected is better than any route.
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

// Carries says whether a repair brings packets for a prefix to a router that announces it. Where its list ends they are forwarded by
// routes of before the failure, and the nearest router with the prefix may be another one there, with what fails on the way.
func (p *Planner) Carries(of *Plan, r Repair, prefix netip.Prefix) bool {
	at, f := p.released(r), p.g.lay(of.Failures[r.Failure])
	there := p.Announcers(at, prefix)
	return len(there) > 0 && !slices.ContainsFunc(there, func(a int) bool {
		return a != r.Destination && !p.g.safe(int32(at), int32(a), f)
	})
}

// released is the router from which packets go on as they were: see [Repair.SIDs].
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
