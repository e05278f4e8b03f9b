// SPDX-License-Identifier: Apache-2.0

package draw

import (
	"math"
	"slices"

	"github.com/weir-project/weir/feature/reroute/topo"
)

// Dimensions in the picture's own units.
const (
	margin = 60
	line   = 20 // of the title
	foot   = 34 // of the legend
	radius = 7  // of a router
	apart  = 24 // between the middles of two routers
)

// stretches are the parts of evenness given to the positions, in the order of trial. 0 is to scale.
var stretches = []float64{0, 0.25, 0.5, 0.75, 0.9}

// fit returns the layout with room for the texts. It takes the least stretch with room for all of them, else the one
// with the fewest without room.
func fit(n *topo.Network, s Scene) *picture {
	at := layout(n)
	var best *picture
	for _, stretch := range stretches {
		p := &picture{n: n, s: s}
		p.arrange(at, stretch)
		p.label()
		if best == nil || p.missing() < best.missing() {
			best = p
		}
		if float64(p.missing()) <= 0.03*float64(len(at)) {
			break
		}
	}
	return best
}

// arrange scales the layout to the picture. Large networks get a larger one.
func (p *picture) arrange(at []topo.Point, stretch float64) {
	p.stretched = stretch > 0
	low, high := at[0], at[0]
	for _, a := range at {
		low = topo.Point{X: min(low.X, a.X), Y: min(low.Y, a.Y)}
		high = topo.Point{X: max(high.X, a.X), Y: max(high.Y, a.Y)}
	}
	p.width = math.Round(1000 * max(1, math.Sqrt(float64(len(at))/120)))
	inner := p.width - 2*margin
	scale := inner / max(high.X-low.X, (high.Y-low.Y)*1.1, 1e-9)
	w, h := scale*(high.X-low.X), scale*(high.Y-low.Y)
	x := even(at, stretch, func(a topo.Point) float64 { return a.X })
	y := even(at, stretch, func(a topo.Point) float64 { return -a.Y })
	w += (inner - w) * stretch
	h += (inner*0.75 - h) * stretch
	top := float64(margin + len(p.s.Title)*line)
	left := (p.width - w) / 2
	p.at = make([]topo.Point, len(at))
	for i := range at {
		p.at[i] = topo.Point{X: left + w*x[i], Y: top + h*y[i]}
	}
	p.at = spread(p.at, apart)
	p.bottom = top + h
	for i, a := range p.at { // spread may push routers out
		p.at[i].X = min(max(a.X, 20), p.width-20)
		p.at[i].Y = max(a.Y, top-margin+20)
		p.bottom = max(p.bottom, p.at[i].Y)
	}
	p.top = top - margin + 6
	p.bottom += margin / 2
}

// even returns one coordinate of all points, from 0 to 1: a mean of the position and of the rank. Ranks give crowded
// parts more room, and wide gaps less. The order along the axis stays.
func even(at []topo.Point, stretch float64, of func(topo.Point) float64) []float64 {
	sorted := make([]float64, len(at))
	for i, a := range at {
		sorted[i] = of(a)
	}
	slices.Sort(sorted)
	low, high := sorted[0], sorted[len(sorted)-1]
	out := make([]float64, len(at))
	for i, a := range at {
		if high == low {
			out[i] = 0.5
			continue
		}
		first, _ := slices.BinarySearch(sorted, of(a))
		equal := first
		for equal+1 < len(sorted) && sorted[equal+1] == sorted[first] {
			equal++
		}
		rank := float64(first+equal) / 2 / float64(len(sorted)-1)
		out[i] = (1-stretch)*(of(a)-low)/(high-low) + stretch*rank
	}
	return out
}

// spread moves routers apart if they are at almost one place: sites of one city.
func spread(at []topo.Point, least float64) []topo.Point {
	out := slices.Clone(at)
	for range 40 {
		moved := false
		for i := range out {
			for j := range i {
				dx, dy := out[i].X-out[j].X, out[i].Y-out[j].Y
				d := math.Hypot(dx, dy)
				if d >= least {
					continue
				}
				if d == 0 {
					dx, dy, d = math.Cos(float64(i)), math.Sin(float64(i)), 1
				}
				by := (least - d) / 2
				out[i].X += dx / d * by
				out[i].Y += dy / d * by
				out[j].X -= dx / d * by
				out[j].Y -= dy / d * by
				moved = true
			}
		}
		if !moved {
			break
		}
	}
	return out
}
