// SPDX-License-Identifier: Apache-2.0

package draw

import (
	"math"
	"math/rand/v2"
	"slices"

	"github.com/weir-project/weir/feature/reroute/topo"
)

// layout gives every router a position. Positions of the source stay; other routers are pushed apart and pulled to
// their neighbours (Fruchterman and Reingold, 1991). The start is a circle, so equal networks get equal pictures.
func layout(n *topo.Network) []topo.Point {
	at := make([]topo.Point, len(n.Nodes))
	fixed := make([]bool, len(n.Nodes))
	var placed []topo.Point
	shrink := 1.0
	if n.Geographic {
		shrink = math.Cos(middleLatitude(n) * math.Pi / 180)
	}
	for i, x := range n.Nodes {
		if x.At != nil {
			at[i] = topo.Point{X: x.At.X * shrink, Y: x.At.Y}
			fixed[i] = true
			placed = append(placed, at[i])
		}
	}
	centre, radius := extent(placed)
	if len(placed) < len(at) {
		at = bestLayout(n, at, fixed, centre, radius)
	}
	return at
}

// bestLayout tries several start circles and keeps the layout with the fewest crossings. A single start often leaves
// some crossings forever.
func bestLayout(n *topo.Network, given []topo.Point, fixed []bool, centre topo.Point, radius float64) []topo.Point {
	starts := max(1, min(12, 600/len(given)))
	var best []topo.Point
	least := math.MaxInt
	r := rand.New(rand.NewPCG(1, 1))
	for start := range starts {
		at := slices.Clone(given)
		order := r.Perm(len(at))
		for i := range at {
			place := i
			if start > 0 {
				place = order[i]
			}
			if a := 2 * math.Pi * float64(place) / float64(len(at)); !fixed[i] {
				at[i] = topo.Point{X: centre.X + radius*math.Cos(a), Y: centre.Y + radius*math.Sin(a)}
			}
		}
		relax(n, at, fixed, radius)
		if starts == 1 {
			return at
		}
		if c := crossings(n, at); c < least {
			best, least = at, c
		}
	}
	return best
}

// crossings counts pairs of crossing links.
func crossings(n *topo.Network, at []topo.Point) (count int) {
	side := func(a, b, c topo.Point) float64 { return (b.X-a.X)*(c.Y-a.Y) - (b.Y-a.Y)*(c.X-a.X) }
	for i, k := range n.Links {
		for j, l := range n.Links[:i] {
			if i > k.Reverse || j > l.Reverse || k.From == l.From || k.From == l.To || k.To == l.From || k.To == l.To {
				continue
			}
			a, b, c, d := at[k.From], at[k.To], at[l.From], at[l.To]
			if side(a, b, c)*side(a, b, d) < 0 && side(c, d, a)*side(c, d, b) < 0 {
				count++
			}
		}
	}
	return count
}

func middleLatitude(n *topo.Network) float64 {
	low, high := 90.0, -90.0
	for _, x := range n.Nodes {
		if x.At != nil {
			low, high = min(low, x.At.Y), max(high, x.At.Y)
		}
	}
	return min(80, max(-80, (low+high)/2))
}

// extent returns the middle of points and half their spread, or 1 for no spread.
func extent(points []topo.Point) (topo.Point, float64) {
	if len(points) == 0 {
		return topo.Point{}, 1
	}
	low, high := points[0], points[0]
	for _, p := range points {
		low = topo.Point{X: min(low.X, p.X), Y: min(low.Y, p.Y)}
		high = topo.Point{X: max(high.X, p.X), Y: max(high.Y, p.Y)}
	}
	radius := max(high.X-low.X, high.Y-low.Y) / 2
	if radius == 0 {
		radius = 1
	}
	return topo.Point{X: (low.X + high.X) / 2, Y: (low.Y + high.Y) / 2}, radius
}

func relax(n *topo.Network, at []topo.Point, fixed []bool, radius float64) {
	// A round is quadratic in the routers, and a picture of a thousand shows little anyway.
	rounds := max(40, min(300, 40_000_000/(len(at)*len(at))))
	k := 2 * radius / math.Sqrt(float64(len(at)))
	for round := range rounds {
		move := make([]topo.Point, len(at))
		push := func(i, j int, force func(d float64) float64) {
			dx, dy := at[i].X-at[j].X, at[i].Y-at[j].Y
			d := math.Hypot(dx, dy)
			if d < k/1000 { // at one place: push each in its own direction
				dx, dy, d = math.Cos(float64(i)), math.Sin(float64(i)), 1
				dx, dy, d = dx*k/1000, dy*k/1000, d*k/1000
			}
			f := force(d)
			move[i].X += dx / d * f
			move[i].Y += dy / d * f
			move[j].X -= dx / d * f
			move[j].Y -= dy / d * f
		}
		for i := range at {
			for j := range i {
				push(i, j, func(d float64) float64 { return k * k / d })
			}
		}
		for i, l := range n.Links {
			if i < l.Reverse {
				push(l.From, l.To, func(d float64) float64 { return -d * d / k })
			}
		}
		heat := radius / 5 * (1 - float64(round)/float64(rounds))
		for i := range at {
			if d := math.Hypot(move[i].X, move[i].Y); d > 0 && !fixed[i] {
				step := min(d, heat)
				at[i].X += move[i].X / d * step
				at[i].Y += move[i].Y / d * step
			}
		}
	}
}
