// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"math"

	"github.com/weir-project/weir/feature/reroute/topo"
)

// infinite is the distance of unreachable nodes.
const infinite = math.MaxUint64 / 4

// graph is a network arranged for shortest paths.
type graph struct {
	*topo.Network
	start   []int32 // start of node i's links in order
	order   []int32 // links by From
	cost    []uint64
	pre     []*tree // shortest paths in the whole network by source, computed on demand
	heap    heap
	stamp   []uint32 // nodes and
	links   []uint32 // links marked in this round of a change
	round   uint32
	useSIDs bool
}

func newGraph(n *topo.Network) *graph {
	g := &graph{Network: n, start: make([]int32, len(n.Nodes)+1), order: make([]int32, len(n.Links)), cost: make([]uint64, len(n.Links)),
		pre: make([]*tree, len(n.Nodes)), stamp: make([]uint32, len(n.Nodes)), links: make([]uint32, len(n.Links)), useSIDs: n.HasSIDs()}
	for i, l := range n.Links {
		g.start[l.From+1]++
		g.cost[i] = uint64(l.Metric)
	}
	for i := range n.Nodes {
		g.start[i+1] += g.start[i]
	}
	fill := append([]int32(nil), g.start...)
	for i, l := range n.Links {
		g.order[fill[l.From]] = int32(i)
		fill[l.From]++
	}
	return g
}

// out returns the links of a node.
func (g *graph) out(node int32) []int32 { return g.order[g.start[node]:g.start[node+1]] }

// tree holds the distances from one node, and the reachable nodes ordered by distance.
type tree struct {
	source int32
	dist   []uint64
	near   []int32
}

// from returns the shortest paths from a node in the whole network.
func (g *graph) from(node int32) *tree {
	if g.pre[node] == nil {
		g.pre[node] = g.spf(node)
	}
	return g.pre[node]
}

// dist returns the distance in the whole network, as known to node x.
func (g *graph) dist(x, y int32) uint64 { return g.from(x).dist[y] }

// spf is Dijkstra's algorithm. An overloaded router is reached, but not passed (ISO 10589 section 7.2.8.1).
func (g *graph) spf(source int32) *tree {
	t := &tree{source: source, dist: make([]uint64, len(g.Nodes)), near: make([]int32, 0, len(g.Nodes))}
	for i := range t.dist {
		t.dist[i] = infinite
	}
	t.dist[source] = 0
	g.heap.reset()
	g.heap.push(0, source)
	g.settle(t, nil)
	return t
}

// settle finishes the nodes on the heap and the nodes behind them, without the failed links of f.
func (g *graph) settle(t *tree, f *failure) {
	for len(g.heap) > 0 {
		d, x := g.heap.pop()
		if d > t.dist[x] {
			continue
		}
		t.near = append(t.near, x)
		if g.Nodes[x].Overload && x != t.source {
			continue
		}
		for _, l := range g.out(x) {
			y := int32(g.Links[l].To)
			if near := d + g.cost[l]; near < t.dist[y] && (f == nil || !f.includes(g, l)) {
				t.dist[y] = near
				g.heap.push(near, y)
			}
		}
	}
}

// without computes the shortest paths after a failure from the paths before. Nodes without a remaining shortest path
// get a new distance from their other neighbours. All others keep theirs (as in RFC 5286's and ARPANET's incremental
// SPF).
func (g *graph) without(before *tree, f *failure) *tree {
	lost := g.lose(before, f)
	t := &tree{source: before.source, dist: append([]uint64(nil), before.dist...), near: make([]int32, 0, len(before.near))}
	g.heap.reset()
	for _, x := range lost {
		t.dist[x] = infinite
	}
	for _, x := range lost {
		if f.gone(x) {
			continue
		}
		best := uint64(infinite)
		for _, l := range g.out(x) {
			in := int32(g.Links[l].Reverse)
			y := int32(g.Links[l].To)
			if g.stamp[y] == g.round || f.includes(g, in) || g.Nodes[y].Overload && y != t.source {
				continue
			}
			best = min(best, t.dist[y]+g.cost[in])
		}
		if best < infinite {
			t.dist[x] = best
			g.heap.push(best, x)
		}
	}
	again := &tree{source: t.source, dist: t.dist}
	g.settle(again, f)
	t.near = merge(t, before.near, again.near, func(x int32) bool { return g.stamp[x] == g.round })
	return t
}

// lose marks and lists the nodes without a remaining shortest path, nearest first.
func (g *graph) lose(before *tree, f *failure) (lost []int32) {
	g.round++
	for _, x := range before.near {
		if x == before.source {
			continue
		}
		kept := false
		for _, l := range g.out(x) {
			in := int32(g.Links[l].Reverse)
			y := int32(g.Links[l].To)
			if g.stamp[y] != g.round && !f.includes(g, in) && before.dist[y]+g.cost[in] == before.dist[x] &&
				(!g.Nodes[y].Overload || y == before.source) {
				kept = true
				break
			}
		}
		if !kept || f.gone(x) {
			g.stamp[x] = g.round
			lost = append(lost, x)
		}
	}
	return lost
}

// merge merges the nodes with a kept and a new distance into one order.
func merge(t *tree, kept, anew []int32, lost func(int32) bool) []int32 {
	out := t.near
	for _, x := range kept {
		if lost(x) {
			continue
		}
		for len(anew) > 0 && t.dist[anew[0]] < t.dist[x] {
			out, anew = append(out, anew[0]), anew[1:]
		}
		out = append(out, x)
	}
	return append(out, anew...)
}

// heap is a binary heap of nodes by distance, ties by number, so plans are deterministic.
type heap []heapItem

type heapItem struct {
	dist uint64
	node int32
}

func (h *heap) reset() { *h = (*h)[:0] }

func (a heapItem) before(b heapItem) bool {
	return a.dist < b.dist || a.dist == b.dist && a.node < b.node
}

func (h *heap) push(dist uint64, node int32) {
	*h = append(*h, heapItem{dist, node})
	s := *h
	for i := len(s) - 1; i > 0; {
		up := (i - 1) / 2
		if !s[i].before(s[up]) {
			return
		}
		s[i], s[up] = s[up], s[i]
		i = up
	}
}

func (h *heap) pop() (dist uint64, node int32) {
	s := *h
	top := s[0]
	last := len(s) - 1
	s[0] = s[last]
	s = s[:last]
	*h = s
	for i := 0; ; {
		least := i
		for _, child := range [2]int{2*i + 1, 2*i + 2} {
			if child < last && s[child].before(s[least]) {
				least = child
			}
		}
		if least == i {
			return top.dist, top.node
		}
		s[i], s[least] = s[least], s[i]
		i = least
	}
}
