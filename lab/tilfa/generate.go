// SPDX-License-Identifier: Apache-2.0

package tilfa

import (
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/weir-project/weir/feature/reroute/topo"
)

// generated returns networks without input files, equal for the same seed. They are meshes with many equal
// paths, rings with long detours, parallel links, LANs, and metrics different by direction.
func generated(seed uint64) []*topo.Network {
	var out []*topo.Network
	add := func(name string, build func(*topo.Builder, *rand.Rand)) {
		b := topo.NewBuilder(name)
		build(b, rand.New(rand.NewPCG(seed, uint64(len(out)))))
		n, err := b.Network()
		if err != nil {
			panic("lab/tilfa: " + err.Error())
		}
		out = append(out, n)
	}
	for _, k := range []int{3, 4, 5, 8, 13, 20} {
		add(fmt.Sprintf("ring-%d", k), func(b *topo.Builder, _ *rand.Rand) { ring(b, k, func(int) uint32 { return 10 }) })
	}
	for _, k := range []int{6, 11, 16} {
		add(fmt.Sprintf("ring-%d-weighted", k), func(b *topo.Builder, r *rand.Rand) { ring(b, k, func(int) uint32 { return 1 + r.Uint32N(40) }) })
	}
	for _, d := range [][2]int{{3, 3}, {4, 5}, {6, 6}, {10, 10}} {
		add(fmt.Sprintf("grid-%dx%d", d[0], d[1]), func(b *topo.Builder, _ *rand.Rand) { grid(b, d[0], d[1], false, func() uint32 { return 1 }) })
	}
	add("grid-7x7-weighted", func(b *topo.Builder, r *rand.Rand) { grid(b, 7, 7, false, func() uint32 { return 1 + r.Uint32N(5) }) })
	add("torus-5x6", func(b *topo.Builder, _ *rand.Rand) { grid(b, 5, 6, true, func() uint32 { return 1 }) })
	add("torus-8x8", func(b *topo.Builder, _ *rand.Rand) { grid(b, 8, 8, true, func() uint32 { return 1 }) })
	for _, k := range []int{4, 6, 8} {
		add(fmt.Sprintf("fat-tree-%d", k), func(b *topo.Builder, _ *rand.Rand) { fatTree(b, k) })
	}
	for _, k := range []int{20, 50, 100, 200} {
		add(fmt.Sprintf("geometric-%d", k), func(b *topo.Builder, r *rand.Rand) {
			geometric(b, k, r, func(d uint32) (uint32, uint32) { return d, d })
		})
	}
	for _, k := range []int{25, 60} {
		add(fmt.Sprintf("geometric-%d-steps", k), func(b *topo.Builder, r *rand.Rand) {
			geometric(b, k, r, func(d uint32) (uint32, uint32) { return 1 + d/150, 1 + d/150 }) // few values: many equal paths
		})
	}
	for _, k := range []int{15, 40} {
		add(fmt.Sprintf("geometric-%d-one-way", k), func(b *topo.Builder, r *rand.Rand) {
			geometric(b, k, r, func(d uint32) (uint32, uint32) { return d + r.Uint32N(d), d + r.Uint32N(d) })
		})
	}
	for _, k := range []int{6, 12, 24} {
		add(fmt.Sprintf("parallel-%d", k), func(b *topo.Builder, r *rand.Rand) { parallel(b, k, r) })
	}
	for _, k := range []int{2, 5} {
		add(fmt.Sprintf("dual-homed-%d", k), func(b *topo.Builder, _ *rand.Rand) { dualHomed(b, k) })
	}
	add("lans", lans)
	add("geometric-30-overload", func(b *topo.Builder, r *rand.Rand) {
		geometric(b, 30, r, func(d uint32) (uint32, uint32) { return d, d })
		for i := 0; i < 30; i += 7 {
			b.At(i).Overload = true
		}
	})
	return out
}

func node(b *topo.Builder, x, y float64) int {
	i := b.Node(fmt.Sprintf("n%d", len(b.Names())))
	b.At(i).At = &topo.Point{X: x, Y: y}
	return i
}

func ring(b *topo.Builder, k int, metric func(int) uint32) {
	for i := range k {
		a := 2 * math.Pi * float64(i) / float64(k)
		node(b, math.Cos(a), math.Sin(a))
	}
	for i := range k {
		b.Cable(i, (i+1)%k, metric(i))
	}
}

func grid(b *topo.Builder, rows, columns int, closed bool, metric func() uint32) {
	for i := range rows * columns {
		node(b, float64(i%columns), float64(i/columns))
	}
	for r := range rows {
		for c := range columns {
			i := r*columns + c
			if c+1 < columns || closed {
				b.Cable(i, r*columns+(c+1)%columns, metric())
			}
			if r+1 < rows || closed {
				b.Cable(i, (r+1)%rows*columns+c, metric())
			}
		}
	}
}

// fatTree builds a k-ary fat tree of switches (Al-Fares et al., SIGCOMM 2008), without hosts.
func fatTree(b *topo.Builder, k int) {
	half := k / 2
	core := make([]int, half*half)
	for i := range core {
		core[i] = node(b, float64(i)*float64(k)/float64(half), 2)
	}
	for pod := range k {
		var up []int
		for i := range half {
			up = append(up, node(b, float64(pod*half+i), 1))
			for j := range half {
				b.Cable(up[i], core[i*half+j], 1)
			}
		}
		for i := range half {
			edge := node(b, float64(pod*half+i), 0)
			for _, u := range up {
				b.Cable(edge, u, 1)
			}
		}
	}
}

// geometric scatters routers in a square, connects each with its nearest two, and near ones with a
// probability decreasing with distance.
func geometric(b *topo.Builder, k int, r *rand.Rand, metrics func(uint32) (uint32, uint32)) {
	x, y := make([]float64, k), make([]float64, k)
	for i := range k {
		x[i], y[i] = 1000*r.Float64(), 1000*r.Float64()
		node(b, x[i], y[i])
	}
	joined := map[[2]int]bool{}
	join := func(i, j int) {
		i, j = min(i, j), max(i, j)
		if i == j || joined[[2]int{i, j}] {
			return
		}
		joined[[2]int{i, j}] = true
		there, back := metrics(1 + uint32(math.Hypot(x[i]-x[j], y[i]-y[j])))
		b.Link(topo.Link{From: i, To: j, Metric: there}, topo.Link{Metric: back})
	}
	reach := 1000 / math.Sqrt(float64(k))
	for i := range k {
		near := []int{-1, -1}
		dist := func(j int) float64 { return math.Hypot(x[i]-x[j], y[i]-y[j]) }
		for j := range k {
			if j == i {
				continue
			}
			if near[0] < 0 || dist(j) < dist(near[0]) {
				near[0], near[1] = j, near[0]
			} else if near[1] < 0 || dist(j) < dist(near[1]) {
				near[1] = j
			}
			if r.Float64() < 0.5*math.Exp(-dist(j)/reach) && dist(j) < 3*reach {
				join(i, j)
			}
		}
		join(i, near[0])
		join(i, near[1])
	}
}

// parallel builds a ring with chords. One to three links of equal or different metrics connect neighbours.
func parallel(b *topo.Builder, k int, r *rand.Rand) {
	for i := range k {
		a := 2 * math.Pi * float64(i) / float64(k)
		node(b, math.Cos(a), math.Sin(a))
	}
	bundle := func(i, j int) {
		for range 1 + r.IntN(3) {
			b.Cable(i, j, 10*(1+r.Uint32N(2)))
		}
	}
	for i := range k {
		bundle(i, (i+1)%k)
		if i%3 == 0 && k > 3 {
			bundle(i, (i+k/2)%k)
		}
	}
}

// dualHomed builds a ring of core routers. Each pair of them serves access routers with two links each.
func dualHomed(b *topo.Builder, pairs int) {
	ring(b, 2*pairs, func(i int) uint32 { return uint32(10 + 10*(i%2)) })
	for p := range pairs {
		for range 3 {
			access := node(b, 2*math.Cos(float64(len(b.Names()))), 2*math.Sin(float64(len(b.Names()))))
			b.Cable(access, 2*p, 100)
			b.Cable(access, 2*p+1, 100)
		}
	}
}

// lans builds a ring in which some neighbours share a medium with a third router.
func lans(b *topo.Builder, _ *rand.Rand) {
	ring(b, 9, func(int) uint32 { return 10 })
	for i := range 3 {
		name := fmt.Sprintf("lan%d", i)
		members := []int{i, i + 3, i + 6}
		for x, from := range members {
			for _, to := range members[x+1:] {
				b.Link(topo.Link{From: from, To: to, Metric: 15, LAN: name}, topo.Link{Metric: 15, LAN: name})
			}
		}
	}
}

// share assigns shared-risk groups to some cables: pairs of cables meeting at a router, like in one duct.
func share(n *topo.Network, r *rand.Rand) {
	grouped := map[int]bool{}
	for i := range n.Nodes {
		var free []int
		for l, o := range n.Links {
			if o.From == i && !grouped[l] {
				free = append(free, l)
			}
		}
		if len(free) < 2 || r.IntN(2) == 0 {
			continue
		}
		r.Shuffle(len(free), func(a, b int) { free[a], free[b] = free[b], free[a] })
		for _, l := range free[:2] {
			name := fmt.Sprintf("duct%d", i)
			for _, side := range []int{l, n.Links[l].Reverse} {
				n.Links[side].SRLGs = append(n.Links[side].SRLGs, name)
				grouped[side] = true
			}
		}
	}
}
