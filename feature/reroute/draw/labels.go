// SPDX-License-Identifier: Apache-2.0

package draw

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/weir-project/weir/feature/reroute/topo"
	draws "github.com/weir-project/weir/internal/picture"
)

// Sizes of texts.
const (
	nameSize   = 13
	metricSize = 11
)

// text is a placed text.
type text struct {
	text   string
	box    box
	x      float64
	anchor string
	bold   bool
	line   *[2]topo.Point // to its router, if the text is not beside it
}

type box struct{ x0, y0, x1, y1 float64 }

func around(a topo.Point, r float64) box { return box{a.X - r, a.Y - r, a.X + r, a.Y + r} }

func (b box) meets(o box) bool { return b.x0 < o.x1 && o.x0 < b.x1 && b.y0 < o.y1 && o.y0 < b.y1 }

// cell is the side of a cell of the picture, for the search of neighbours.
const cell = 40

// space is the used space of a picture.
type space struct {
	boxes map[[2]int][]box // closed to texts, by cell
	lines map[[2]int][]dot // of links and paths, by cell
}

// dot is a point of a line. Texts cover cheap ones.
type dot struct {
	topo.Point
	cost float64
}

func cells(b box, visit func([2]int)) {
	for x := int(math.Floor(b.x0 / cell)); x <= int(math.Floor(b.x1/cell)); x++ {
		for y := int(math.Floor(b.y0 / cell)); y <= int(math.Floor(b.y1/cell)); y++ {
			visit([2]int{x, y})
		}
	}
}

func (s *space) use(b box) {
	cells(b, func(c [2]int) { s.boxes[c] = append(s.boxes[c], b) })
}

func (s *space) free(b box) bool {
	free := true
	cells(b, func(c [2]int) { free = free && !slices.ContainsFunc(s.boxes[c], b.meets) })
	return free
}

// cross marks a curve.
func (s *space) cross(c curve, cost float64) {
	steps := int(math.Hypot(c.to.X-c.from.X, c.to.Y-c.from.Y)/6) + 2
	for k := range steps + 1 {
		p := c.point(float64(k) / float64(steps))
		at := [2]int{int(math.Floor(p.X / cell)), int(math.Floor(p.Y / cell))}
		s.lines[at] = append(s.lines[at], dot{p, cost})
	}
}

// covered returns the cost of the lines below a box.
func (s *space) covered(b box) (cost float64) {
	cells(b, func(c [2]int) {
		for _, d := range s.lines[c] {
			if d.X > b.x0 && d.X < b.x1 && d.Y > b.y0 && d.Y < b.y1 {
				cost += d.cost
			}
		}
	})
	return cost
}

// label places all texts: first names, beginning with the path, then metrics.
func (p *picture) label() {
	p.space = &space{map[[2]int][]box{}, map[[2]int][]dot{}}
	for _, a := range p.at {
		p.space.use(around(a, radius+2))
	}
	for _, s := range p.s.Segments {
		p.space.use(around(p.stop(s), 12))
	}
	for i, l := range p.n.Links {
		if i > l.Reverse {
			continue
		}
		p.space.cross(p.curve(i), 1)
		if p.failed(i) {
			p.space.use(around(p.curve(i).point(0.5), 9))
		}
	}
	for _, l := range slices.Concat(p.before(), p.after()) {
		p.space.cross(p.curve(l), 6)
	}
	for _, i := range p.order() {
		p.name(i)
	}
	p.metrics()
}

// order returns all routers: first the path, then the others by their number of near neighbours.
func (p *picture) order() []int {
	crowd := make([]int, len(p.at))
	for i, a := range p.at {
		for j, b := range p.at[:i] {
			if math.Hypot(a.X-b.X, (a.Y-b.Y)*2) < 100 {
				crowd[i]++
				crowd[j]++
			}
		}
	}
	var rest []int
	for i := range p.at {
		if !slices.Contains(p.s.After, i) {
			rest = append(rest, i)
		}
	}
	slices.SortStableFunc(rest, func(a, b int) int { return cmp.Compare(crowd[b], crowd[a]) })
	path := slices.Clone(p.s.After)
	slices.Sort(path)
	return append(slices.Compact(path), rest...)
}

// name places a router's name: beside it, else a short way off with a line. A name without room is left out.
func (p *picture) name(i int) {
	t := text{text: shorten(p.n.Nodes[i].Name), bold: slices.Contains(p.s.After, i)}
	w, a := draws.Width(t.text, nameSize, t.bold), p.at[i]
	var best *text
	least := math.Inf(1)
	try := func(x, y, cost float64, far bool) { // the middle of the text, relative to the router
		b := box{a.X + x - w/2, a.Y + y - 7, a.X + x + w/2, a.Y + y + 7}
		if b.x0 < 6 || b.x1 > p.width-6 || b.y0 < p.top || b.y1 > p.bottom+2 || !p.space.free(b) {
			return
		}
		if cost += p.space.covered(b); cost >= least {
			return
		}
		c := t
		c.box, least, best = b, cost, &c
		c.x, c.anchor = b.x0, "start" // the width is an upper bound, so the text starts at its router
		switch {
		case b.x1 < a.X:
			c.x, c.anchor = b.x1, "end"
		case b.x0 < a.X:
			c.x, c.anchor = (b.x0+b.x1)/2, "middle"
		}
		if far {
			c.line = &[2]topo.Point{a, {X: min(max(a.X, b.x0), b.x1), Y: min(max(a.Y, b.y0+1), b.y1-1)}}
		}
	}
	side := w/2 + radius + 5
	for k, c := range []topo.Point{{X: side}, {X: -side}, {Y: -radius - 10}, {Y: radius + 10},
		{X: side - 5, Y: -12}, {X: side - 5, Y: 12}, {X: -side + 5, Y: -12}, {X: -side + 5, Y: 12},
		{X: side * 0.6, Y: -radius - 10}, {X: side * 0.6, Y: radius + 10}, {X: -side * 0.6, Y: -radius - 10}, {X: -side * 0.6, Y: radius + 10}} {
		try(c.X, c.Y, float64(k)/4, false)
	}
	for far := 30.0; best == nil && far < 130; far += 10 {
		for turn := range 16 {
			sin, cos := math.Sincos(float64(turn) * math.Pi / 8)
			try(cos*(far+w/2-10), sin*far, 0, true)
		}
	}
	if best == nil {
		p.nameless++
		return
	}
	p.space.use(best.box)
	if best.line != nil {
		p.far++
		p.space.cross(curve{best.line[0], best.line[0], best.line[1]}, 3)
	}
	p.names = append(p.names, *best)
}

func shorten(name string) string {
	if runes := []rune(name); len(runes) > 24 {
		return string(runes[:23]) + "…"
	}
	return name
}

// metrics places the metrics of the links, unless all are equal or there are too many.
func (p *picture) metrics() {
	if len(p.n.Links) > 320 || !slices.ContainsFunc(p.n.Links, func(l topo.Link) bool { return l.Metric != p.n.Links[0].Metric }) {
		return
	}
	thick := slices.Concat(p.before(), p.after())
	for i, l := range p.n.Links {
		if i > l.Reverse || p.failed(i) {
			continue
		}
		beside := 0.0 // of a thick line
		if slices.Contains(thick, i) || slices.Contains(thick, l.Reverse) {
			beside = 11
		}
		t := text{text: fmt.Sprint(l.Metric), anchor: "middle"}
		if back := p.n.Links[l.Reverse].Metric; back != l.Metric {
			t.text += "/" + fmt.Sprint(back)
		}
		half := draws.Width(t.text, metricSize, false)/2 + 1
		p.unlabelled++
		for k, part := range []float64{0.5, 0.5, 0.4, 0.4, 0.6, 0.6, 0.3, 0.3, 0.7, 0.7} {
			m := p.curve(i).beside(part, beside*float64(1-k%2*2))
			if b := (box{m.X - half, m.Y - 6, m.X + half, m.Y + 6}); p.space.free(b) {
				p.unlabelled--
				p.space.use(b)
				t.box, t.x = b, m.X
				p.ofLinks = append(p.ofLinks, t)
				break
			}
		}
	}
}

// missing weighs the texts without a good place.
func (p *picture) missing() int { return 8*p.nameless + 2*p.far + p.unlabelled }
