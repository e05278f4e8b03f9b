// SPDX-License-Identifier: Apache-2.0

// Package picturetest finds faults of SVG pictures: texts on each other, texts outside, small texts, no title, no
// colours for dark pages.
package picturetest

import (
	"bytes"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"

	"github.com/weir-project/weir/internal/picture"
)

// Box is an area of a picture.
type Box struct{ X0, Y0, X1, Y1 float64 }

// Overlap returns the area common to two boxes, reduced by a rim of half a unit.
func (b Box) Overlap(o Box) float64 {
	return max(0, min(b.X1, o.X1)-max(b.X0, o.X0)-0.5) * max(0, min(b.Y1, o.Y1)-max(b.Y0, o.Y0)-0.5)
}

// Text is a text of a picture with its box.
type Text struct {
	Text, Class string
	Size        float64
	Box         Box
}

// Circle is a circle of a picture.
type Circle struct {
	Class   string
	X, Y, R float64
}

// Box returns the square around a circle.
func (c Circle) Box() Box { return Box{c.X - c.R, c.Y - c.R, c.X + c.R, c.Y + c.R} }

// Picture is the readable part of an SVG.
type Picture struct {
	X, Y          float64 // of the upper left corner
	Width, Height float64
	Title, Style  string
	Texts         []Text
	Circles       []Circle
	Coloured      []string // elements with a fixed colour
}

// style is the inherited font of an element.
type style struct {
	size         float64
	heavy, mono  bool
	anchor       string
	x, y         float64 // translation
	turned, skip bool
}

// Read reads a picture. It follows the style of this project's pictures, not all of SVG.
func Read(svg []byte) (*Picture, error) {
	p := &Picture{}
	css := rules{}
	stack := []style{{size: 16, anchor: "start"}}
	var open []*Text // by depth; nil for no text
	var names []string
	for d := xml.NewDecoder(bytes.NewReader(svg)); ; {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return p, p.complete()
		}
		if err != nil {
			return nil, err
		}
		switch e := token.(type) {
		case xml.StartElement:
			s := css.of(e, stack[len(stack)-1])
			stack = append(stack, s)
			names = append(names, e.Name.Local)
			open = append(open, p.start(e, s))
		case xml.CharData:
			p.text(string(e), names, open, css)
		case xml.EndElement:
			last := len(open) - 1
			if t := open[last]; t != nil {
				p.finish(t, stack[last+1])
			}
			stack, names, open = stack[:last+1], names[:last], open[:last]
		}
	}
}

func (p *Picture) complete() error {
	if p.Width == 0 || p.Height == 0 {
		return errors.New("no viewBox")
	}
	return nil
}

func (p *Picture) start(e xml.StartElement, s style) *Text {
	for _, name := range []string{"fill", "stroke"} {
		if v := attribute(e, name); strings.HasPrefix(v, "#") || v == "white" || v == "black" {
			p.Coloured = append(p.Coloured, fmt.Sprintf("%s %s=%q", e.Name.Local, name, v))
		}
	}
	switch e.Name.Local {
	case "svg":
		if f := strings.Fields(attribute(e, "viewBox")); len(f) == 4 {
			p.X, p.Y, p.Width, p.Height = number(f[0]), number(f[1]), number(f[2]), number(f[3])
		}
	case "circle":
		if !s.skip {
			p.Circles = append(p.Circles, Circle{attribute(e, "class"), s.x + number(attribute(e, "cx")), s.y + number(attribute(e, "cy")), number(attribute(e, "r"))})
		}
	case "text":
		t := &Text{Class: attribute(e, "class"), Size: s.size}
		t.Box.X0, t.Box.Y0 = s.x+number(attribute(e, "x")), s.y+number(attribute(e, "y"))
		return t
	}
	return nil
}

func (p *Picture) text(text string, names []string, open []*Text, css rules) {
	if len(names) == 0 {
		return
	}
	switch names[len(names)-1] {
	case "title":
		if len(names) == 2 {
			p.Title += text
		}
	case "style":
		p.Style += text
		css.read(text)
	default:
		for _, t := range open {
			if t != nil {
				t.Text += text
			}
		}
	}
}

// finish sets the box of a text. A turned text stands along its axis and has no box.
func (p *Picture) finish(t *Text, s style) {
	t.Text = strings.TrimSpace(t.Text)
	if t.Text == "" || s.skip {
		return
	}
	w := picture.Width(t.Text, t.Size, s.heavy)
	if s.mono {
		w = 0.602 * t.Size * float64(len([]rune(t.Text)))
	}
	x, y := t.Box.X0, t.Box.Y0
	switch s.anchor {
	case "middle":
		x -= w / 2
	case "end":
		x -= w
	}
	t.Box = Box{x, y - 0.76*t.Size, x + w, y + 0.2*t.Size}
	if s.turned { // around its own position, by 90 degrees
		t.Box = Box{t.Box.X0 + w/2 - t.Size*0.76, y - w/2, t.Box.X0 + w/2 + t.Size*0.2, y + w/2}
	}
	p.Texts = append(p.Texts, *t)
}

// rules are the font rules of a style sheet, by selector.
type rules map[string]map[string]string

var (
	comment = regexp.MustCompile(`(?s)/\*.*?\*/`)
	rule    = regexp.MustCompile(`([^{}]+)\{([^{}]*)\}`)
)

func (r rules) read(text string) {
	text = comment.ReplaceAllString(text, "")
	if i := strings.Index(text, "@media"); i >= 0 {
		text = text[:i] // colours only
	}
	for _, m := range rule.FindAllStringSubmatch(text, -1) {
		for selector := range strings.SplitSeq(m[1], ",") {
			selector = strings.TrimSpace(selector)
			if r[selector] == nil {
				r[selector] = map[string]string{}
			}
			for d := range strings.SplitSeq(m[2], ";") {
				if name, value, ok := strings.Cut(d, ":"); ok {
					r[selector][strings.TrimSpace(name)] = strings.TrimSpace(value)
				}
			}
		}
	}
}

// of returns the style of an element inside another one.
func (r rules) of(e xml.StartElement, outer style) style {
	s := outer
	for _, a := range e.Attr {
		s.set(a.Name.Local, a.Value)
	}
	s.skip = s.skip || e.Name.Local == "defs"
	selectors := []string{e.Name.Local}
	for class := range strings.FieldsSeq(attribute(e, "class")) {
		selectors = append(selectors, "."+class, e.Name.Local+"."+class)
	}
	for _, selector := range selectors {
		for name, value := range r[selector] {
			s.set(name, value)
		}
	}
	return s
}

var (
	pixels = regexp.MustCompile(`(\d+(?:\.\d+)?)px`)
	moved  = regexp.MustCompile(`translate\(\s*(-?[\d.]+)[ ,]*(-?[\d.]+)?\s*\)`)
)

func (s *style) set(name, value string) {
	switch name {
	case "font-size":
		s.size = number(strings.TrimSuffix(value, "px"))
	case "font":
		if m := pixels.FindStringSubmatch(value); m != nil {
			s.size = number(m[1])
		}
		s.mono = strings.Contains(value, "mono")
		s.heavy = heavy(strings.Fields(value)[0])
	case "font-family":
		s.mono = strings.Contains(value, "mono")
	case "font-weight":
		s.heavy = heavy(value)
	case "text-anchor":
		s.anchor = value
	case "transform":
		if m := moved.FindStringSubmatch(value); m != nil {
			s.x, s.y = s.x+number(m[1]), s.y+number(m[2])
		}
		s.turned = s.turned || strings.Contains(value, "rotate")
	}
}

func heavy(weight string) bool { return weight == "bold" || number(weight) >= 600 }

func attribute(e xml.StartElement, name string) string {
	for _, a := range e.Attr {
		if a.Name.Local == name {
			return a.Value
		}
	}
	return ""
}

func number(text string) float64 {
	n, err := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(text), "px"), 64)
	if err != nil {
		return 0
	}
	return n
}

// Problems returns the faults of a picture, each in a sentence.
func Problems(svg []byte) (out []string) {
	p, err := Read(svg)
	if err != nil {
		return []string{err.Error()}
	}
	add := func(format string, a ...any) { out = append(out, fmt.Sprintf(format, a...)) }
	if strings.TrimSpace(p.Title) == "" {
		add("no title")
	}
	if !strings.Contains(p.Style, "prefers-color-scheme: dark") {
		add("no colours for dark pages")
	}
	for _, e := range p.Coloured {
		add("a fixed colour cannot follow the page: %s", e)
	}
	for i, t := range p.Texts {
		if t.Box.X0 < p.X || t.Box.Y0 < p.Y || t.Box.X1 > p.X+p.Width || t.Box.Y1 > p.Y+p.Height {
			add("%q is outside: %.0f", t.Text, t.Box)
		}
		for _, o := range p.Texts[:i] {
			if t.Box.Overlap(o.Box) > 0 {
				add("%q lies on %q", t.Text, o.Text)
			}
		}
	}
	return out
}

// unit is the end of an axis title: (ms), or a word for pure counts.
var unit = regexp.MustCompile(`\([^()]+\)$`)

// PlotProblems returns the faults of a plot: of any picture, and axes without a title or unit.
func PlotProblems(svg []byte) []string {
	out := Problems(svg)
	p, err := Read(svg)
	if err != nil {
		return out
	}
	axes, title := 0, false
	for _, t := range p.Texts {
		switch t.Class {
		case "axis":
			axes++
			if !unit.MatchString(t.Text) {
				out = append(out, fmt.Sprintf("axis %q has no unit", t.Text))
			}
		case "heading", "b":
			title = true
		}
	}
	if axes != 2 {
		out = append(out, fmt.Sprintf("%d of 2 axes have a title", axes))
	}
	if !title {
		out = append(out, "no visible title")
	}
	return out
}

// The text of a GitHub page is this wide, in pixels. Text below the least size is hard to read.
const (
	pageWidth = 830
	leastText = 9.0
)

// SmallTexts returns the texts of a picture too small to read on a page.
func SmallTexts(svg []byte) (out []string) {
	p, err := Read(svg)
	if err != nil {
		return []string{err.Error()}
	}
	for _, t := range p.Texts {
		if shown := t.Size * min(1, pageWidth/p.Width); shown < leastText {
			out = append(out, fmt.Sprintf("%q: %.1f pixels high on a page", t.Text, shown))
		}
	}
	return out
}
