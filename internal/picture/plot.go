// SPDX-License-Identifier: Apache-2.0

package picture

import (
	"fmt"
	"math"
	"strings"
)

// Axis is a logarithmic axis with a line at each power of ten.
type Axis struct {
	Title     string
	Unit      string // like ms; a plot without units is not readable
	Low, High float64
	Scale     float64 // of the written numbers: 100 for shares in percent
}

// part returns the position of a value, from 0 at Low to 1 at High. Values beyond stand at the end.
func (a Axis) part(v float64) float64 {
	return math.Log(min(max(v, a.Low), a.High)/a.Low) / math.Log(a.High/a.Low)
}

func (a Axis) title() string { return fmt.Sprintf("%s (%s)", a.Title, a.Unit) }

// Curve is a line of a plot.
type Curve struct {
	Name   string
	Second bool // in the second colour
	Dashed bool
	Points [][2]float64
}

// Plot is a diagram with curves.
type Plot struct {
	Title  string
	X, Y   Axis
	Curves []Curve
}

// The plot, in its own units.
const (
	plotWidth, plotHeight = 800.0, 440.0
	left, top, under      = 76.0, 48.0, 62.0
	plotText              = 13
)

// SVG draws the plot.
func (p Plot) SVG() []byte {
	right := 0.0
	for _, c := range p.Curves {
		right = max(right, Width(c.Name, plotText, false)+66)
	}
	x := func(v float64) float64 { return left + (plotWidth-left-right)*p.X.part(v) }
	y := func(v float64) float64 { return top + (plotHeight-top-under)*(1-p.Y.part(v)) }
	var b strings.Builder
	Head(&b, plotWidth, plotHeight, p.Title, `.first { stroke: #1a7f37 } .second { stroke: #0969da } .curve { fill: none; stroke-width: 2 } .dashed { stroke-dasharray: 5 4 }
@media (prefers-color-scheme: dark) { .first { stroke: #3fb950 } .second { stroke: #4493f8 } }`)
	fmt.Fprintf(&b, `<text x="20" y="28" font-size="15" class="b">%s</text>`+"\n", Escape(p.Title))
	for v := range p.X.powers {
		fmt.Fprintf(&b, `<path d="M%.1f %gV%g" class="grid"/><text x="%.1f" y="%g" font-size="%d" text-anchor="middle">%s</text>`+"\n",
			x(v), top, plotHeight-under, x(v), plotHeight-under+18, plotText, p.X.number(v))
	}
	for v := range p.Y.powers {
		fmt.Fprintf(&b, `<path d="M%g %.1fH%.1f" class="grid"/><text x="%g" y="%.1f" font-size="%d" text-anchor="end">%s</text>`+"\n",
			left, y(v), plotWidth-right, left-8, y(v)+4.5, plotText, p.Y.number(v))
	}
	fmt.Fprintf(&b, `<text x="%.1f" y="%g" font-size="%d" text-anchor="middle" class="axis">%s</text>`+"\n",
		(left+plotWidth-right)/2, plotHeight-18, plotText, Escape(p.X.title()))
	fmt.Fprintf(&b, `<text transform="translate(22 %g) rotate(-90)" font-size="%d" text-anchor="middle" class="axis">%s</text>`+"\n",
		(top+plotHeight-under)/2, plotText, Escape(p.Y.title()))
	for i, c := range p.Curves {
		var points []string
		for _, at := range c.Points {
			points = append(points, fmt.Sprintf("%.1f,%.1f", x(at[0]), y(at[1])))
		}
		class := "curve first"
		if c.Second {
			class = "curve second"
		}
		if c.Dashed {
			class += " dashed"
		}
		fmt.Fprintf(&b, `<polyline points="%s" class="%s"/>`+"\n", strings.Join(points, " "), class)
		at := top + 12 + 24*float64(i)
		fmt.Fprintf(&b, `<path d="M%.1f %gh28" class="%s"/><text x="%.1f" y="%g" font-size="%d">%s</text>`+"\n",
			plotWidth-right+14, at, class, plotWidth-right+50, at+4.5, plotText, Escape(c.Name))
	}
	b.WriteString("</svg>\n")
	return []byte(b.String())
}

// powers yields the powers of ten on the axis.
func (a Axis) powers(yield func(float64) bool) {
	for e := math.Ceil(math.Log10(a.Low) - 1e-9); e <= math.Log10(a.High)+1e-9; e++ {
		if !yield(math.Pow(10, e)) {
			return
		}
	}
}

func (a Axis) number(v float64) string {
	if a.Scale != 0 {
		v *= a.Scale
	}
	text := fmt.Sprintf("%.6g", v)
	if v >= 1000 {
		text = text[:len(text)-3] + "," + text[len(text)-3:]
	}
	return text
}
