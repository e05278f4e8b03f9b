// SPDX-License-Identifier: Apache-2.0

// Package draw draws networks and repairs as SVG.
package draw

import (
	"encoding/xml"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/weir-project/weir/feature/reroute/topo"
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

// Dimensions in the picture's own units.
const (
	width  = 1000
	margin = 60
	line   = 20 // of the title
	radius = 7  // of a router
)

const (
	grey   = "#b8bec6"
	red    = "#d62839"
	blue   = "#3572b0"
	green  = "#1b8a5a"
	orange = "#e08e0b"
)

type picture struct {
	strings.Builder
	n      *topo.Network
	s      Scene
	at     []topo.Point
	height float64
	boxes  []box    // occupied areas
	labels []string // labels of links, written over the paths
}

type box struct{ x0, y0, x1, y1 float64 }

// SVG draws a network.
func SVG(n *topo.Network, s Scene) []byte {
	p := &picture{n: n, s: s}
	p.fit()
	fmt.Fprintf(p, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %.0f" font-family="sans-serif" font-size="12">`+"\n", width, p.height)
	fmt.Fprintf(p, `<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="3.4" markerHeight="3.4" orient="auto"><path d="M0 0L8 4L0 8z" fill="%s"/></marker></defs>`+"\n", green)
	fmt.Fprintf(p, `<rect width="%d" height="%.0f" fill="white"/>`+"\n", width, p.height)
	for i, text := range s.Title {
		weight := "normal"
		if i == 0 {
			weight = "bold"
		}
		fmt.Fprintf(p, `<text x="20" y="%d" font-size="15" font-weight="%s">%s</text>`+"\n", 26+i*line, weight, escape(text))
	}
	p.links()
	p.path(s.Before, blue, 3, ` stroke-dasharray="2 5" stroke-linecap="round"`, -1)
	p.path(s.After, green, 4.5, ` marker-end="url(#tip)"`, s.Out)
	for _, l := range p.labels {
		p.WriteString(l)
	}
	p.nodes()
	p.stops()
	p.legend()
	p.WriteString("</svg>\n")
	return []byte(p.String())
}

func escape(text string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(text)) // a Builder never fails
	return b.String()
}

// fit scales the layout to the picture.
func (p *picture) fit() {
	p.at = layout(p.n)
	low, high := p.at[0], p.at[0]
	for _, a := range p.at {
		low = topo.Point{X: min(low.X, a.X), Y: min(low.Y, a.Y)}
		high = topo.Point{X: max(high.X, a.X), Y: max(high.Y, a.Y)}
	}
	scale := float64(width-2*margin) / max(high.X-low.X, (high.Y-low.Y)*1.1, 1e-9)
	top := float64(margin + len(p.s.Title)*line)
	left := (width - scale*(high.X-low.X)) / 2
	for i, a := range p.at {
		p.at[i] = topo.Point{X: left + scale*(a.X-low.X), Y: top + scale*(high.Y-a.Y)}
		p.boxes = append(p.boxes, around(p.at[i], radius+1))
	}
	p.height = top + scale*(high.Y-low.Y) + margin + 30
}

func around(a topo.Point, r float64) box { return box{a.X - r, a.Y - r, a.X + r, a.Y + r} }

// curve returns the line of a link, bent if there are parallel links.
func (p *picture) curve(link int) (d string, middle topo.Point) {
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
	d0 := max(math.Hypot(dx, dy), 1)
	control := topo.Point{X: (a.X+b.X)/2 - dy/d0*bend, Y: (a.Y+b.Y)/2 + dx/d0*bend}
	middle = topo.Point{X: (a.X + b.X + 2*control.X) / 4, Y: (a.Y + b.Y + 2*control.Y) / 4}
	// Lines end at the rims, so arrow heads are visible.
	rim := func(from, to topo.Point) topo.Point {
		d := max(math.Hypot(to.X-from.X, to.Y-from.Y), 1)
		return topo.Point{X: from.X + (to.X-from.X)/d*radius, Y: from.Y + (to.Y-from.Y)/d*radius}
	}
	s, e := rim(a, control), rim(b, control)
	return fmt.Sprintf("M%.1f %.1fQ%.1f %.1f %.1f %.1f", s.X, s.Y, control.X, control.Y, e.X, e.Y), middle
}

func (p *picture) links() {
	metrics := len(p.n.Links) <= 160 && slices.ContainsFunc(p.n.Links, func(l topo.Link) bool { return l.Metric != p.n.Links[0].Metric })
	label := func(format string, a ...any) { p.labels = append(p.labels, fmt.Sprintf(format, a...)) }
	for i, l := range p.n.Links {
		if i > l.Reverse {
			continue
		}
		d, middle := p.curve(i)
		if slices.Contains(p.s.Failed, i) || slices.Contains(p.s.Failed, l.Reverse) {
			fmt.Fprintf(p, `<path d="%s" fill="none" stroke="%s" stroke-width="2" stroke-dasharray="6 4"/>`+"\n", d, red)
			label(`<path d="M%.1f %.1fl12 12m0 -12l-12 12" stroke="%s" stroke-width="3.5"/>`+"\n", middle.X-6, middle.Y-6, red)
			p.boxes = append(p.boxes, around(middle, 8))
			continue
		}
		fmt.Fprintf(p, `<path d="%s" fill="none" stroke="%s" stroke-width="1.6"/>`+"\n", d, grey)
		if metrics {
			text := fmt.Sprint(l.Metric)
			if back := p.n.Links[l.Reverse].Metric; back != l.Metric {
				text += "/" + fmt.Sprint(back)
			}
			half := 3.2 * float64(len(text))
			b := box{middle.X - half, middle.Y - 6, middle.X + half, middle.Y + 6}
			if p.free(b) {
				p.boxes = append(p.boxes, b)
				label(`<text x="%.1f" y="%.1f" font-size="10" fill="#68707a" text-anchor="middle" paint-order="stroke" stroke="white" stroke-width="4">%s</text>`+"\n",
					middle.X, middle.Y+4, text)
			}
		}
	}
}

func (p *picture) free(b box) bool {
	return !slices.ContainsFunc(p.boxes, func(o box) bool { return b.x0 < o.x1 && o.x0 < b.x1 && b.y0 < o.y1 && o.y0 < b.y1 })
}

// path draws a path. first is its first link, or -1.
func (p *picture) path(routers []int, colour string, stroke float64, more string, first int) {
	for i := 1; i < len(routers); i++ {
		link := -1
		if i == 1 {
			link = first
		}
		for _, s := range p.s.Segments { // use the adjacency segment's link, not a parallel one
			if link < 0 && colour == green && s.Link >= 0 && p.n.Links[s.Link].From == routers[i-1] && p.n.Links[s.Link].To == routers[i] {
				link = s.Link
			}
		}
		if link < 0 {
			link = p.cheapest(routers[i-1], routers[i])
		}
		if link < 0 {
			continue
		}
		d, middle := p.curve(link)
		fmt.Fprintf(p, `<path d="%s" fill="none" stroke="%s" stroke-width="%.1f"%s/>`+"\n", d, colour, stroke, more)
		p.keepClear(p.at[routers[i-1]], middle, p.at[routers[i]])
	}
}

// keepClear reserves the space along a path, so labels avoid it.
func (p *picture) keepClear(points ...topo.Point) {
	for i := 1; i < len(points); i++ {
		a, b := points[i-1], points[i]
		steps := int(math.Hypot(b.X-a.X, b.Y-a.Y)/8) + 1
		for k := range steps {
			part := float64(k) / float64(steps)
			p.boxes = append(p.boxes, around(topo.Point{X: a.X + (b.X-a.X)*part, Y: a.Y + (b.Y-a.Y)*part}, 4))
		}
	}
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

func (p *picture) nodes() {
	for i, a := range p.at {
		fill, edge := "white", "#3c434c"
		switch {
		case i == p.s.Gone:
			fill, edge = "#fbdcdf", red
		case len(p.s.After) > 0 && (i == p.s.After[0] || i == p.s.After[len(p.s.After)-1]):
			fill = "#3c434c"
		}
		fmt.Fprintf(p, `<circle cx="%.1f" cy="%.1f" r="%d" fill="%s" stroke="%s" stroke-width="1.6"/>`+"\n", a.X, a.Y, radius, fill, edge)
		if i == p.s.Gone {
			fmt.Fprintf(p, `<path d="M%.1f %.1fl10 10m0 -10l-10 10" stroke="%s" stroke-width="3"/>`+"\n", a.X-5, a.Y-5, red)
		}
	}
	for _, s := range p.s.Segments {
		if s.Link < 0 {
			p.boxes = append(p.boxes, around(p.at[s.Node], 12))
		}
	}
	// Routers on the path first: they get the good places.
	order := slices.Clone(p.s.After)
	for i := range p.at {
		if !slices.Contains(order, i) {
			order = append(order, i)
		}
	}
	for _, i := range order {
		p.name(i)
	}
}

// name writes a router's name at the place covering least.
func (p *picture) name(i int) {
	text := p.n.Nodes[i].Name
	if runes := []rune(text); len(runes) > 24 {
		text = string(runes[:23]) + "…"
	}
	a, w := p.at[i], 7.2*float64(len([]rune(text)))
	var best box
	least := math.Inf(1)
	for _, c := range []topo.Point{{X: radius + 6, Y: -6}, {X: -radius - 6 - w, Y: -6}, {X: -w / 2, Y: -radius - 15}, {X: -w / 2, Y: radius + 3},
		{X: radius + 1, Y: -18}, {X: radius + 1, Y: 6}, {X: -radius - 1 - w, Y: -18}, {X: -radius - 1 - w, Y: 6}} {
		b := box{a.X + c.X, a.Y + c.Y, a.X + c.X + w, a.Y + c.Y + 12}
		covered := 0.0
		for _, o := range p.boxes {
			covered += max(0, min(b.x1, o.x1)-max(b.x0, o.x0)) * max(0, min(b.y1, o.y1)-max(b.y0, o.y0))
		}
		if b.x0 < 2 || b.x1 > width-2 {
			covered += 1000
		}
		if covered < least {
			best, least = b, covered
		}
	}
	p.boxes = append(p.boxes, best)
	weight := "normal"
	if slices.Contains(p.s.After, i) {
		weight = "bold"
	}
	x, anchor := best.x0, "start" // the width is estimated, so anchor the text at the router's side
	switch middle := (best.x0 + best.x1) / 2; {
	case best.x1 < a.X:
		x, anchor = best.x1, "end"
	case best.x0 < a.X:
		x, anchor = middle, "middle"
	}
	fmt.Fprintf(p, `<text x="%.1f" y="%.1f" font-weight="%s" text-anchor="%s" paint-order="stroke" stroke="white" stroke-width="3">%s</text>`+"\n",
		x, best.y0+10, weight, anchor, escape(text))
}

// stops draws the numbers of the segments.
func (p *picture) stops() {
	for i, s := range p.s.Segments {
		a := p.at[s.Node]
		if s.Link >= 0 {
			_, a = p.curve(s.Link)
		}
		fmt.Fprintf(p, `<circle cx="%.1f" cy="%.1f" r="10" fill="%s" stroke="white" stroke-width="1.5"/><text x="%.1f" y="%.1f" fill="white" font-weight="bold" text-anchor="middle">%d</text>`+"\n",
			a.X, a.Y, orange, a.X, a.Y+4.2, i+1)
	}
}

func (p *picture) legend() {
	y := p.height - 18
	x := 20.0
	item := func(sample, text string) {
		fmt.Fprintf(p, sample+"\n", x, y-4)
		fmt.Fprintf(p, `<text x="%.0f" y="%.0f">%s</text>`+"\n", x+36, y, escape(text))
		x += 60 + 6.5*float64(len(text))
	}
	stroke := func(colour, more string) string {
		return `<path d="M%.0f %.0fh28" stroke="` + colour + `" ` + more + `/>`
	}
	if len(p.s.Before) > 0 {
		item(stroke(blue, `stroke-width="3" stroke-dasharray="2 5" stroke-linecap="round"`), "path before")
	}
	if len(p.s.Failed) > 0 {
		item(stroke(red, `stroke-width="2" stroke-dasharray="6 4"`), "failed")
	}
	if len(p.s.After) > 0 {
		item(stroke(green, `stroke-width="4.5"`), "repair")
	}
	if len(p.s.Segments) > 0 {
		item(`<circle cx="%.0f" cy="%.0f" r="9" transform="translate(14 0)" fill="`+orange+`"/>`, "segment, at its router or on its link")
	}
}
