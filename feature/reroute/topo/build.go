// SPDX-License-Identifier: Apache-2.0

package topo

import (
	"cmp"
	"fmt"
	"math"
	"net/netip"
	"slices"
)

// Builder builds a network step by step.
type Builder struct {
	n      *Network
	byName map[string]int
}

// NewBuilder starts a network with a name.
func NewBuilder(name string) *Builder {
	return &Builder{n: &Network{Name: name}, byName: map[string]int{}}
}

// Node adds a router and returns its index. For an existing name it returns that router's index.
func (b *Builder) Node(name string) int {
	if i, ok := b.byName[name]; ok {
		return i
	}
	i := len(b.n.Nodes)
	b.byName[name] = i
	b.n.Nodes = append(b.n.Nodes, Node{Name: name})
	return i
}

// At returns a node for changes. The pointer is valid until the next node is added.
func (b *Builder) At(i int) *Node { return &b.n.Nodes[i] }

// Link adds both directions of an adjacency, each as seen from its own From. It returns the index of the first.
func (b *Builder) Link(there, back Link) int {
	i := len(b.n.Links)
	there.Reverse, back.Reverse = i+1, i
	back.From, back.To = there.To, there.From
	if !back.Local.IsValid() {
		back.Local = there.Remote
	}
	if !there.Local.IsValid() {
		there.Local = back.Remote
	}
	b.n.Links = append(b.n.Links, there, back)
	return i
}

// Cable adds an adjacency with equal metrics in both directions.
func (b *Builder) Cable(from, to int, metric uint32) int {
	return b.Link(Link{From: from, To: to, Metric: metric}, Link{Metric: metric})
}

// Announce adds a prefix of a router. If the router already has the prefix, the lower metric counts.
func (b *Builder) Announce(node int, p netip.Prefix, metric uint32) {
	x := b.At(node)
	p = p.Masked()
	if i := slices.Index(x.Prefixes, p); i < 0 {
		x.Prefixes = append(x.Prefixes, p)
	} else {
		metric = min(metric, x.Metrics[p])
	}
	if delete(x.Metrics, p); metric > 0 {
		if x.Metrics == nil {
			x.Metrics = map[netip.Prefix]uint32{}
		}
		x.Metrics[p] = metric
	}
}

// note adds a sentence about omitted parts of the source.
func (b *Builder) note(format string, a ...any) {
	b.n.Notes = append(b.n.Notes, fmt.Sprintf(format, a...))
}

// Network checks and returns the network.
func (b *Builder) Network() (*Network, error) {
	if len(b.n.Nodes) == 0 {
		return nil, fmt.Errorf("network %s has no node", b.n.Name)
	}
	return b.n, b.n.Check()
}

// half is one direction from a source listing directions separately, with hints to pair it.
type half struct {
	Link
	mine, other string // equal to the other direction's other and mine; "" if unknown
}

// join pairs directions. Routers use an adjacency only if both ends announce it (ISO 10589 section 7.2.8.2). Unpaired
// directions are noted and omitted.
func (b *Builder) join(halves []half) {
	used := make([]bool, len(halves))
	byEnds := map[[2]int][]int{}
	for i, h := range halves {
		byEnds[[2]int{h.From, h.To}] = append(byEnds[[2]int{h.From, h.To}], i)
	}
	match := func(fits func(a, b half) bool) {
		for i, h := range halves {
			if used[i] {
				continue
			}
			for _, j := range byEnds[[2]int{h.To, h.From}] {
				if !used[j] && fits(h, halves[j]) {
					used[i], used[j] = true, true
					b.Link(h.Link, halves[j].Link)
					break
				}
			}
		}
	}
	match(func(x, y half) bool { return x.mine != "" && x.mine == y.other && x.other == y.mine })
	// Indistinguishable parallel links are paired by equal metrics, because most links have equal ones.
	match(func(x, y half) bool { return (x.mine == "" || y.mine == "") && x.Metric == y.Metric })
	match(func(x, y half) bool { return x.mine == "" || y.mine == "" })
	for i, h := range halves {
		if !used[i] {
			b.note("%s→%s is announced by %s only and omitted", b.n.Nodes[h.From].Name, b.n.Nodes[h.To].Name, b.n.Nodes[h.From].Name)
		}
	}
}

// member is a router's attachment to a shared medium: a link without To.
type member struct {
	Link
	endX map[int]netip.Addr // its End.X SIDs by neighbour
}

// lan links every two routers of a shared medium.
func (b *Builder) lan(name string, members []member) {
	slices.SortStableFunc(members, func(x, y member) int { return cmp.Compare(x.From, y.From) })
	for i, x := range members {
		for _, y := range members[i+1:] {
			if x.From == y.From {
				continue
			}
			there, back := x.Link, y.Link
			there.To, there.LAN, back.LAN = y.From, name, name
			there.Remote, back.Remote = y.Local, x.Local
			there.EndX, back.EndX = x.endX[y.From], y.endX[x.From]
			b.Link(there, back)
		}
	}
}

// metric converts a number from a file to a metric: rounded, and at least 1.
func metric(v float64) (uint32, error) {
	v = math.Round(v)
	if math.IsNaN(v) || v < 0 || v > maxMetric {
		return 0, fmt.Errorf("metric %v: use 0 to %d", v, maxMetric)
	}
	return uint32(max(v, 1)), nil
}

// Names lists the nodes added so far.
func (b *Builder) Names() []string {
	var out []string
	for _, x := range b.n.Nodes {
		out = append(out, x.Name)
	}
	return out
}
