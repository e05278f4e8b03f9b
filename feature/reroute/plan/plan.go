// SPDX-License-Identifier: Apache-2.0

// Package plan computes repairs of failures by segment routing (TI-LFA, draft-ietf-rtgwg-segment-routing-ti-lfa; P
// and Q spaces as in RFC 7490, SRv6 functions as in RFC 8986).
//
// A failure is a link, neighbour or shared-risk group of a router. For each failure and each destination behind it, a
// repair is a first hop and the shortest list of SRv6 segments. It takes a packet to the destination along its
// post-convergence path, while all other routers still forward as before the failure. If routers split traffic over
// equal paths, a segment is used only if all of its paths avoid the failure.
package plan

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/weir-project/weir/feature/reroute/topo"
)

// Mode is the assumed failure when a link goes down.
type Mode string

const (
	Link Mode = "link" // the link, with all adjacencies of this router on the same LAN
	Node Mode = "node" // the router at its other end
	SRLG Mode = "srlg" // the link, and all links sharing a risk group with it
)

// Modes lists the modes.
func Modes() []Mode { return []Mode{Link, Node, SRLG} }

// Failure is a failure avoided by a set of repairs.
type Failure struct {
	Mode  Mode
	Local []int // failed links of the planning router
	Node  int   // failed router; -1 except in mode Node
	Links []int // all failed links, both directions
}

// Segment is one function of a segment list. It leads to a router by any of the equal shortest paths, or from there
// over one of its links. An End.X SID is in its router's locator, so the latter needs one SID too.
type Segment struct {
	Node int // router owning the SID
	Link int // link of an adjacency segment (End.X), or -1 for End
}

// Repair is the planning router's handling of packets for a destination during a failure.
type Repair struct {
	Failure     int       // index in Plan.Failures
	Protects    Mode      // the plan's mode, or Link as a fallback (Options.Fallback)
	Destination int       // node
	Out         int       // output link, regardless of the routing table
	Segments    []Segment // in order of travel; none if the first hop's own routes suffice
	Metric      uint64    // of the post-convergence path
}

// Unprotected is a destination without a repair for a failure.
type Unprotected struct {
	Failure     int
	Destination int
	Reason      Reason
}

// Reason explains a missing repair.
type Reason string

const (
	Cut         Reason = "cut"                     // no path remains: a bridge, a cut node, a cut of shared links
	Itself      Reason = "the destination fails"   // in mode Node only
	MissingSIDs Reason = "SIDs are missing for it" // a path exists, but its routers lack SIDs
)

// Plan holds one router's repairs for all failures next to it.
type Plan struct {
	Network     *topo.Network
	Node        int
	Mode        Mode
	Failures    []Failure
	Repairs     []Repair
	Unprotected []Unprotected

	index map[[2]int]int // repair by local link and destination
}

// Options of a plan.
type Options struct {
	Mode Mode
	// Fallback protects against the link's failure if protection against the node's or group's is impossible. The
	// neighbour itself then stays reachable if only the link to it is down.
	Fallback bool
}

// Planner computes the plans of a network's routers. It caches the shortest paths shared by plans. It is not safe for
// concurrent use.
type Planner struct {
	g         *graph
	announced map[netip.Prefix][]int // announcing routers, cached
}

// New returns a planner. The network must not change afterwards.
func New(n *topo.Network) *Planner { return &Planner{g: newGraph(n)} }

// Plan computes a router's repairs.
func (p *Planner) Plan(node int, o Options) (*Plan, error) {
	if node < 0 || node >= len(p.g.Nodes) {
		return nil, fmt.Errorf("the network has %d nodes, but no node %d", len(p.g.Nodes), node)
	}
	if !slices.Contains(Modes(), o.Mode) {
		return nil, fmt.Errorf("unknown protection mode %q: use one of %v", o.Mode, Modes())
	}
	out := &Plan{Network: p.g.Network, Node: node, Mode: o.Mode, Failures: p.g.failures(int32(node), o.Mode), index: map[[2]int]int{}}
	for i := range out.Failures {
		out.protect(p.g, i, o.Mode)
	}
	if o.Fallback && o.Mode != Link {
		out.fallBack(p.g)
	}
	return out, nil
}

// For returns the repair of packets for a destination leaving by a local link, if any.
func (p *Plan) For(link, destination int) (*Repair, bool) {
	i, ok := p.index[[2]int{link, destination}]
	if !ok {
		return nil, false
	}
	return &p.Repairs[i], true
}

// failures lists the possible failures next to a router, in the order of its links.
func (g *graph) failures(node int32, mode Mode) (out []Failure) {
	done := map[int32]bool{}
	for _, l := range g.out(node) {
		if done[l] {
			continue
		}
		f := g.newFailure(l, mode)
		for _, local := range g.out(node) {
			if slices.Contains(f.Links, int(local)) && !done[local] {
				// In mode SRLG another local link may have more groups and so a failure of its own.
				if mode != SRLG || slices.Equal(g.newFailure(local, mode).Links, f.Links) {
					f.Local = append(f.Local, int(local))
					done[local] = true
				}
			}
		}
		out = append(out, f)
	}
	return out
}

func (g *graph) newFailure(link int32, mode Mode) Failure {
	l := g.Links[link]
	f := Failure{Mode: mode, Node: -1}
	for i, o := range g.Links {
		hit := i == int(link)
		switch mode {
		case Link:
			hit = hit || l.LAN != "" && o.From == l.From && o.LAN == l.LAN
		case Node:
			f.Node = l.To
			hit = hit || o.From == l.To
		case SRLG:
			hit = hit || slices.ContainsFunc(o.SRLGs, func(s string) bool { return slices.Contains(l.SRLGs, s) }) ||
				l.LAN != "" && o.From == l.From && o.LAN == l.LAN
		}
		if hit {
			f.Links = append(f.Links, i, o.Reverse)
		}
	}
	slices.Sort(f.Links)
	f.Links = slices.Compact(f.Links)
	return f
}

// failure is a Failure arranged for fast queries.
type failure struct {
	down  []bool // by link
	links []int32
	node  int32
}

func (g *graph) lay(f Failure) *failure {
	out := &failure{down: make([]bool, len(g.Links)), node: int32(f.Node)}
	for _, l := range f.Links {
		out.down[l] = true
		out.links = append(out.links, int32(l))
	}
	return out
}

func (f *failure) includes(_ *graph, link int32) bool { return f.down[link] }

// gone reports whether the node itself fails.
func (f *failure) gone(node int32) bool { return node == f.node }

// safe reports whether all equal shortest paths from x to y in the whole network avoid the failure f. Then they are
// also the shortest paths without f, and no router on them notices it.
func (g *graph) safe(x, y int32, f *failure) bool {
	d := g.dist(x, y)
	if d >= infinite {
		return false
	}
	if f.node >= 0 {
		if x == f.node || y == f.node {
			return false
		}
		return g.Nodes[f.node].Overload || g.dist(x, f.node)+g.dist(f.node, y) != d
	}
	for _, l := range f.links {
		u, v := int32(g.Links[l].From), int32(g.Links[l].To)
		if g.Nodes[u].Overload && u != x || g.Nodes[v].Overload && v != y {
			continue
		}
		if g.dist(x, u)+g.cost[l]+g.dist(v, y) == d {
			return false
		}
	}
	return true
}

// uses reports whether a router sends packets for a destination over a link, alone or among others.
func (g *graph) uses(link, destination int32) bool {
	l := &g.Links[link]
	from, to := int32(l.From), int32(l.To)
	if g.Nodes[to].Overload && to != destination {
		return false
	}
	d := g.dist(from, destination)
	return d < infinite && g.cost[link]+g.dist(to, destination) == d
}

// protect plans for one failure.
func (p *Plan) protect(g *graph, i int, mode Mode) {
	f := g.lay(p.Failures[i])
	source := int32(p.Node)
	var affected []int32
	for d := range int32(len(g.Nodes)) {
		if d != source && slices.ContainsFunc(p.Failures[i].Local, func(l int) bool { return g.uses(int32(l), d) }) {
			affected = append(affected, d)
		}
	}
	if len(affected) == 0 {
		return
	}
	after := g.without(g.from(source), f)
	s := g.search(after, f, false, affected)
	for _, d := range affected {
		out, segments, ok := s.list(d)
		switch {
		case f.gone(d):
			p.Unprotected = append(p.Unprotected, Unprotected{i, int(d), Itself})
		case after.dist[d] >= infinite:
			p.Unprotected = append(p.Unprotected, Unprotected{i, int(d), Cut})
		case !ok:
			p.Unprotected = append(p.Unprotected, Unprotected{i, int(d), MissingSIDs})
		default:
			p.add(Repair{Failure: i, Protects: mode, Destination: int(d), Out: out, Segments: segments, Metric: after.dist[d]})
		}
	}
}

func (p *Plan) add(r Repair) {
	for _, l := range p.Failures[r.Failure].Local {
		key := [2]int{l, r.Destination}
		if _, ok := p.index[key]; !ok {
			p.index[key] = len(p.Repairs)
		}
	}
	p.Repairs = append(p.Repairs, r)
}

// fallBack protects the remaining destinations against failures of single links.
func (p *Plan) fallBack(g *graph) {
	links := &Plan{Network: p.Network, Node: p.Node, Mode: Link, Failures: g.failures(int32(p.Node), Link), index: map[[2]int]int{}}
	for i := range links.Failures {
		links.protect(g, i, Link)
	}
	var left []Unprotected
	for _, u := range p.Unprotected {
		saved := false
		for _, l := range p.Failures[u.Failure].Local {
			r, ok := links.For(l, u.Destination)
			if !ok {
				continue
			}
			saved = true
			again := *r
			again.Failure = len(p.Failures)
			if i := slices.IndexFunc(p.Failures, func(f Failure) bool { return f.Mode == Link && slices.Contains(f.Local, l) }); i >= 0 {
				again.Failure = i
			} else {
				p.Failures = append(p.Failures, links.Failures[r.Failure])
			}
			if _, twice := p.For(l, u.Destination); !twice {
				p.add(again)
			}
		}
		if !saved {
			left = append(left, u)
		}
	}
	p.Unprotected = left
}
