// SPDX-License-Identifier: Apache-2.0

// Package sim forwards packets through a network just after a failure. Every router still has its old
// routing table, the routers next to the failure apply their repairs, and segment endpoints follow RFC
// 8986. It shares only the types of networks and segments with the planner, so the two do not share
// mistakes. Its distances use the algorithm of Floyd and Warshall, and it follows every branch of equal
// paths, hop by hop.
package sim

import (
	"fmt"
	"math"
	"slices"

	"github.com/weir-project/weir/feature/reroute/plan"
	"github.com/weir-project/weir/feature/reroute/topo"
)

// unreachable is the distance without a path.
const unreachable = math.MaxInt64 / 4

// Network is a network before a failure, with every router's table.
type Network struct {
	n     *topo.Network
	dist  [][]int64
	links [][]int // of a node
}

// New computes every router's table.
func New(n *topo.Network) *Network { return tables(n, nil) }

// tables returns the tables of the network without the down links.
func tables(n *topo.Network, down []bool) *Network {
	s := &Network{n: n, dist: distances(n, down), links: make([][]int, len(n.Nodes))}
	for i, l := range n.Links {
		if down == nil || !down[i] {
			s.links[l.From] = append(s.links[l.From], i)
		}
	}
	return s
}

// distances returns the distances between all nodes, without the down links.
func distances(n *topo.Network, down []bool) [][]int64 {
	d := make([][]int64, len(n.Nodes))
	for i := range d {
		d[i] = make([]int64, len(n.Nodes))
		for j := range d[i] {
			d[i][j] = unreachable
		}
		d[i][i] = 0
	}
	for i, l := range n.Links {
		if down == nil || !down[i] {
			d[l.From][l.To] = min(d[l.From][l.To], int64(l.Metric))
		}
	}
	for k := range d {
		if n.Nodes[k].Overload {
			continue
		}
		for i := range d {
			via := d[i][k]
			if via >= unreachable {
				continue
			}
			for j, rest := range d[k] {
				if via+rest < d[i][j] {
					d[i][j] = via + rest
				}
			}
		}
	}
	return d
}

// nextHops appends the links to a destination in a router's table.
func (s *Network) nextHops(out []int, at, to int) []int {
	if s.dist[at][to] >= unreachable {
		return out
	}
	for _, l := range s.links[at] {
		next := s.n.Links[l].To
		if s.n.Nodes[next].Overload && next != to {
			continue
		}
		if int64(s.n.Links[l].Metric)+s.dist[next][to] == s.dist[at][to] {
			out = append(out, l)
		}
	}
	return out
}

// Repair returns a router's action for a packet with its link down.
type Repair func(router, link, destination int) (out int, segments []plan.Segment, ok bool)

// Fate is a set of possible fates of a packet, one bit each: several branches may have several.
type Fate uint8

const (
	Arrived   Fate = 1 << iota
	Repaired       // at least once
	Looped         // it returned to a router in the same state
	UsedFault      // sent to the failed part after a repair: a router drops it, or repairs it back
	NoRepair       // a router next to the failure has no repair for it
	Stranded       // a router has no route, or a foreign segment
	CutOff         // the router next to the failure has no path left, and cannot repair
)

// Faults are the forbidden fates.
const Faults = Looped | UsedFault | NoRepair | Stranded | CutOff

// Outcome counts pairs of source and destination.
type Outcome struct {
	Pairs       int // with a path before the failure, both still present
	Affected    int // with some packets meeting the failure
	Protectable int // affected, with a path after it
	Delivered   int // protectable, with every branch arriving
	Disturbed   int // not affected, but not delivered
	Loops       int
	UsedFault   int // pairs with packets sent to the failed part after their repair
	Examples    []string
}

// Add adds the counts of p.
func (o *Outcome) Add(p Outcome) {
	o.Pairs += p.Pairs
	o.Affected += p.Affected
	o.Protectable += p.Protectable
	o.Delivered += p.Delivered
	o.Disturbed += p.Disturbed
	o.Loops += p.Loops
	o.UsedFault += p.UsedFault
	for _, e := range p.Examples {
		o.example("%s", e)
	}
}

func (o *Outcome) example(format string, a ...any) {
	if len(o.Examples) < 5 {
		o.Examples = append(o.Examples, fmt.Sprintf(format, a...))
	}
}

// Fail removes links (and with them perhaps a node, else -1) and forwards packets between all pairs.
func (s *Network) Fail(links []int, node int, repair Repair) Outcome {
	w := &walk{Network: s, down: make([]bool, len(s.n.Links)), repair: repair}
	for _, l := range links {
		w.down[l] = true
	}
	w.connected = w.components()
	var o Outcome
	for d := range s.n.Nodes {
		if d == node {
			continue
		}
		w.begin(d)
		for src := range s.n.Nodes {
			if src == d || src == node || s.dist[src][d] >= unreachable {
				continue
			}
			o.Pairs++
			w.count(&o, src)
		}
	}
	return o
}

func (w *walk) count(o *Outcome, src int) {
	fate := w.plain(src)
	delivered := fate&Faults == 0 && fate&Arrived != 0
	affected := fate&(Repaired|NoRepair|CutOff) != 0
	connected := w.connected(src, w.to)
	if fate&CutOff != 0 && slices.ContainsFunc(w.n.Nodes, func(x topo.Node) bool { return x.Overload }) {
		// The source has a path unavailable to the repairing router. Such a path begins behind a router
		// with the overload bit, for example the source itself. Without such routers no such pair exists,
		// and this is a fault.
		connected = false
	}
	if fate&Looped != 0 {
		o.Loops++
	}
	if fate&UsedFault != 0 {
		o.UsedFault++
	}
	switch {
	case !affected && !delivered:
		o.Disturbed++
	case affected:
		o.Affected++
		if connected {
			o.Protectable++
			if delivered {
				o.Delivered++
			}
		}
	}
	if connected && !delivered {
		o.example("%s to %s: %s", w.n.Nodes[src].Name, w.n.Nodes[w.to].Name, fate)
	}
}

// components returns a test for a path between two nodes without the failed part. A node with the overload
// bit forwards nothing.
func (w *walk) components() func(a, b int) bool {
	d := make([][]bool, len(w.n.Nodes))
	for src := range d {
		seen := make([]bool, len(w.n.Nodes))
		seen[src] = true
		for todo := []int{src}; len(todo) > 0; {
			x := todo[0]
			todo = todo[1:]
			if w.n.Nodes[x].Overload && x != src {
				continue
			}
			for _, l := range w.links[x] {
				if y := w.n.Links[l].To; !w.down[l] && !seen[y] {
					seen[y] = true
					todo = append(todo, y)
				}
			}
		}
		d[src] = seen
	}
	return func(a, b int) bool { return d[a][b] }
}

func (f Fate) String() string {
	text := ""
	for bit, name := range map[Fate]string{Arrived: "arrives", Repaired: "repaired", Looped: "loops", UsedFault: "sent to the failed part",
		NoRepair: "no repair", Stranded: "stranded", CutOff: "cut off"} {
		if f&bit != 0 {
			if text != "" {
				text += ", "
			}
			text += name
		}
	}
	return text
}

// Alternate returns the first link of a router without segment routing to a neighbour with a path not
// coming back (a loop-free alternate, RFC 5286 section 3.1, inequality 1).
func (s *Network) Alternate(router, link, destination int) (out int, segments []plan.Segment, ok bool) {
	for _, i := range s.links[router] {
		to := s.n.Links[i].To
		if to != s.n.Links[link].To && s.dist[to][destination] < s.dist[to][router]+s.dist[router][destination] {
			return i, nil, true
		}
	}
	return 0, nil, false
}
