// SPDX-License-Identifier: Apache-2.0

// Package draw draws networks and repairs as SVG.
package draw

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/weir-project/weir/feature/reroute/topo"
	draws "github.com/weir-project/weir/internal/picture"
)

// Scene is the content of a picture.
type Scene struct {
	Title    []string // lines above the picture
	Failed   []int    // failed links
	Gone     int      // failed router, or -1
	Before   []int    // routers of the path before the failure
	After    []int    // routers of the repair's path
	Out      int      // the repair's first link, or -1
	Segments []Stop   // in order
}

// Stop is a segment: at a router, or over a link from it.
type Stop struct {
	Node, Link int // Link is -1 for none
}

// styles are the colours and lines, for light and dark pages.
const styles = `.link { stroke: #afb8c1; stroke-width: 1.6; fill: none } .to { stroke: #8c959f; stroke-width: 0.8 }
.failed { stroke: #d1242f; stroke-width: 2; stroke-dasharray: 6 4; fill: none } .cross { stroke: #d1242f; stroke-width: 3.5 }
.before { stroke: #0969da; stroke-width: 3; stroke-dasharray: 2 5; stroke-linecap: round; fill: none }
.repair { stroke: #1a7f37; stroke-width: 4.5; fill: none } .tip { fill: #1a7f37 }
.stop { fill: #bc4c00; stroke: #ffffff; stroke-width: 1.5 } .number { fill: #ffffff; font-weight: bold }
.router { fill: #ffffff; stroke: #3c434c; stroke-width: 1.6 } .end { fill: #3c434c } .gone { fill: #ffebe9; stroke: #d1242f }
@media (prefers-color-scheme: dark) {
.link { stroke: #565e68 } .to { stroke: #6e7681 } .failed, .cross { stroke: #f85149 } .before { stroke: #4493f8 }
.repair { stroke: #3fb950 } .tip { fill: #3fb950 } .stop { stroke: #0d1117 }
.router { fill: #0d1117; stroke: #b1bac4 } .end { fill: #b1bac4 } .gone { fill: #490202; stroke: #f85149 }
}`

type picture struct {
	strings.Builder
	n             *topo.Network
	s             Scene
	at            []topo.Point
	width         float64
	top, bottom   float64 // of the routers and their names
	stretched     bool    // not to scale
	space         *space
	names         []text
	ofLinks       []text // metrics
	nameless, far int    // names left out, and names away from their routers
	unlabelled    int    // metrics left out
}

// SVG draws a network.
func SVG(n *topo.Network, s Scene) []byte {
	p := fit(n, s)
	notes := p.notes()
	height := p.bottom + foot + float64(len(notes)*line)
	draws.Head(p, p.width, math.Round(height), cmp.Or(strings.Join(s.Title, "; "), n.Name, "Network"), styles)
	p.WriteString(`<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="3.4" markerHeight="3.4" orient="auto"><path d="M0 0L8 4L0 8z" class="tip"/></marker></defs>` + "\n")
	for i, text := range s.Title {
		class := ""
		if i == 0 {
			class = ` class="b"`
		}
		size := min(15, 15*(p.width-40)/draws.Width(text, 15, i == 0))
		fmt.Fprintf(p, `<text x="20" y="%d" font-size="%.3g"%s>%s</text>`+"\n", 26+i*line, size, class, draws.Escape(text))
	}
	p.lines()
	p.texts()
	p.stops()
	p.legend(p.bottom + foot - 18)
	for i, note := range notes {
		fmt.Fprintf(p, `<text x="20" y="%.0f" class="dim">%s</text>`+"\n", p.bottom+foot-18+float64((i+1)*line), draws.Escape(note))
	}
	p.WriteString("</svg>\n")
	return []byte(p.String())
}

// notes says where the picture differs from the network.
func (p *picture) notes() (out []string) {
	if p.stretched && slices.ContainsFunc(p.n.Nodes, func(x topo.Node) bool { return x.At != nil }) {
		out = append(out, "not to scale: crowded parts are enlarged, wide gaps are shortened")
	}
	if p.nameless > 0 {
		out = append(out, fmt.Sprintf("no room for the names of %d routers: point at a router to see its name", p.nameless))
	}
	return out
}

// curve is the line of a link: a quadratic Bézier curve.
type curve struct{ from, control, to topo.Point }

// point returns a point of the curve, from 0 to 1.
func (c curve) point(t float64) topo.Point {
	a, b, d := (1-t)*(1-t), 2*t*(1-t), t*t
	return topo.Point{X: a*c.from.X + b*c.control.X + d*c.to.X, Y: a*c.from.Y + b*c.control.Y + d*c.to.Y}
}

// beside returns the point at a distance from the curve.
func (c curve) beside(t, distance float64) topo.Point {
	p, d := c.point(t), max(math.Hypot(c.to.X-c.from.X, c.to.Y-c.from.Y), 1)
	return topo.Point{X: p.X - (c.to.Y-c.from.Y)/d*distance*1.4, Y: p.Y + (c.to.X-c.from.X)/d*distance}
}

// path returns the curve for SVG. It ends at the routers' rims, so arrow heads are visible.
func (c curve) path() string {
	rim := func(from, to topo.Point) topo.Point {
		d := max(math.Hypot(to.X-from.X, to.Y-from.Y), 1)
		return topo.Point{X: from.X + (to.X-from.X)/d*radius, Y: from.Y + (to.Y-from.Y)/d*radius}
	}
	s, e := rim(c.from, c.control), rim(c.to, c.control)
	return fmt.Sprintf("M%.1f %.1fQ%.1f %.1f %.1f %.1f", s.X, s.Y, c.control.X, c.control.Y, e.X, e.Y)
}

// curve returns the line of a link, bent if there are parallel links.
func (p *picture) curve(link int) curve {
	l := p.n.Links[link]
	forth := link
	if l.From > l.To {
		forth = l.Reverse
	}
	rank, all := 0, 0
	for i, o := range p.n.Links {
		if o.From == p.n.Links[forth].From && o.To == p.n.Links[forth].To {
			if i < forth {
				rank++
			}
			all++
		}
	}
	a, b := p.at[l.From], p.at[l.To]
	bend := 34 * (float64(rank) - float64(all-1)/2)
	if l.From > l.To {
		bend = -bend
	}
	dx, dy := b.X-a.X, b.Y-a.Y
	d := max(math.Hypot(dx, dy), 1)
	return curve{a, topo.Point{X: (a.X+b.X)/2 - dy/d*bend, Y: (a.Y+b.Y)/2 + dx/d*bend}, b}
}

func (p *picture) failed(link int) bool {
	return slices.Contains(p.s.Failed, link) || slices.Contains(p.s.Failed, p.n.Links[link].Reverse)
}

// lines draws links, paths and lines from routers to distant names.
func (p *picture) lines() {
	for i, l := range p.n.Links {
		if i > l.Reverse {
			continue
		}
		class := "link"
		if p.failed(i) {
			class = "failed"
		}
		fmt.Fprintf(p, `<path d="%s" class="%s"/>`+"\n", p.curve(i).path(), class)
	}
	for _, t := range p.names {
		if t.line != nil {
			fmt.Fprintf(p, `<path d="M%.1f %.1fL%.1f %.1f" class="to"/>`+"\n", t.line[0].X, t.line[0].Y, t.line[1].X, t.line[1].Y)
		}
	}
	for _, l := range p.before() {
		fmt.Fprintf(p, `<path d="%s" class="before"/>`+"\n", p.curve(l).path())
	}
	for _, l := range p.after() {
		fmt.Fprintf(p, `<path d="%s" class="repair" marker-end="url(#tip)"/>`+"\n", p.curve(l).path())
	}
	for i, l := range p.n.Links {
		if i < l.Reverse && p.failed(i) {
			m := p.curve(i).point(0.5)
			fmt.Fprintf(p, `<path d="M%.1f %.1fl12 12m0 -12l-12 12" class="cross"/>`+"\n", m.X-6, m.Y-6)
		}
	}
}

// before returns the links of the path before the failure.
func (p *picture) before() []int { return p.links(p.s.Before, -1, nil) }

// after returns the links of the repair: its first link, and the links of adjacency segments, not parallel ones.
func (p *picture) after() []int { return p.links(p.s.After, p.s.Out, p.s.Segments) }

func (p *picture) links(routers []int, first int, segments []Stop) (out []int) {
	for i := 1; i < len(routers); i++ {
		link := -1
		if i == 1 {
			link = first
		}
		for _, s := range segments {
			if link < 0 && s.Link >= 0 && p.n.Links[s.Link].From == routers[i-1] && p.n.Links[s.Link].To == routers[i] {
				link = s.Link
			}
		}
		if link < 0 {
			link = p.cheapest(routers[i-1], routers[i])
		}
		if link >= 0 {
			out = append(out, link)
		}
	}
	return out
}

func (p *picture) cheapest(from, to int) int {
	best := -1
	for i, l := range p.n.Links {
		if l.From == from && l.To == to && (best < 0 || l.Metric < p.n.Links[best].Metric) {
			best = i
		}
	}
	return best
}

// texts draws routers, names and metrics.
func (p *picture) texts() {
	for _, t := range p.ofLinks {
		fmt.Fprintf(p, `<text x="%.1f" y="%.1f" font-size="%d" text-anchor="middle" class="dim halo">%s</text>`+"\n", t.x, t.box.y1-2.5, metricSize, t.text)
	}
	for i, a := range p.at {
		class := "router"
		switch {
		case i == p.s.Gone:
			class = "router gone"
		case len(p.s.After) > 0 && (i == p.s.After[0] || i == p.s.After[len(p.s.After)-1]):
			class = "router end"
		}
		fmt.Fprintf(p, `<circle cx="%.1f" cy="%.1f" r="%d" class="%s"><title>%s</title></circle>`+"\n", a.X, a.Y, radius, class, draws.Escape(p.n.Nodes[i].Name))
		if i == p.s.Gone {
			fmt.Fprintf(p, `<path d="M%.1f %.1fl10 10m0 -10l-10 10" class="cross"/>`+"\n", a.X-5, a.Y-5)
		}
	}
	for _, t := range p.names {
		class := "halo"
		if t.bold {
			class = "halo b"
		}
		fmt.Fprintf(p, `<text x="%.1f" y="%.1f" font-size="%d" text-anchor="%s" class="%s">%s</text>`+"\n", t.x, t.box.y0+11, nameSize, t.anchor, class, draws.Escape(t.text))
	}
}

// stop returns the position of a segment's number.
func (p *picture) stop(s Stop) topo.Point {
	if s.Link >= 0 {
		return p.curve(s.Link).point(0.5)
	}
	return p.at[s.Node]
}

// stops draws the numbers of the segments.
func (p *picture) stops() {
	for i, s := range p.s.Segments {
		a := p.stop(s)
		fmt.Fprintf(p, `<circle cx="%.1f" cy="%.1f" r="10" class="stop"/><text x="%.1f" y="%.1f" text-anchor="middle" class="number">%d</text>`+"\n",
			a.X, a.Y, a.X, a.Y+4.2, i+1)
	}
}

func (p *picture) legend(y float64) {
	x := 20.0
	item := func(sample, text string) {
		fmt.Fprintf(p, sample+"\n", x, y-4)
		fmt.Fprintf(p, `<text x="%.0f" y="%.0f">%s</text>`+"\n", x+36, y, draws.Escape(text))
		x += 60 + draws.Width(text, nameSize, false)
	}
	stroke := func(class string) string { return `<path d="M%.0f %.0fh28" class="` + class + `"/>` }
	if len(p.s.Before) > 0 {
		item(stroke("before"), "path before")
	}
	if len(p.s.Failed) > 0 {
		item(stroke("failed"), "failed")
	}
	if len(p.s.After) > 0 {
		item(stroke("repair"), "repair")
	}
	if len(p.s.Segments) > 0 {
		item(`<circle cx="%.0f" cy="%.0f" r="9" transform="translate(14 0)" class="stop"/>`, "segment, at its router or on its link")
	}
}
