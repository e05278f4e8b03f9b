// SPDX-License-Identifier: Apache-2.0

package handofflab

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/weir-project/weir/lab"
)

// curve is a distribution of latencies.
type curve struct {
	name  string
	solid bool
	times []time.Duration
}

// The picture, in its own units.
const (
	width, height          = 760, 420
	left, right, top, foot = 64, 190, 24, 48
)

// draw writes the share of requests slower than a time, with logarithmic axes, because the tail matters.
func draw(e *lab.Env, curves []curve) error {
	if err := os.WriteFile(filepath.Join(e.Dir, "handoff-balance.svg"), picture(curves), 0o644); err != nil {
		return fmt.Errorf("the picture: %w", err)
	}
	return nil // --keep DIR keeps it; make results puts it beside the table
}

func picture(curves []curve) []byte {
	const shortest, longest, least = 1.0, 10000.0, 0.0005 // ms, ms, share
	x := func(ms float64) float64 {
		ms = min(max(ms, shortest), longest)
		return left + (width-left-right)*math.Log(ms/shortest)/math.Log(longest/shortest)
	}
	y := func(share float64) float64 {
		return top + (height-top-foot)*math.Log(max(share, least))/math.Log(least)
	}
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12">`+"\n", width, height)
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="white"/>`+"\n", width, height)
	for ms := shortest; ms <= longest; ms *= 10 {
		fmt.Fprintf(&b, `<path d="M%.1f %d V%d" stroke="#ddd"/><text x="%.1f" y="%d" text-anchor="middle">%g</text>`+"\n", x(ms), top, height-foot, x(ms), height-foot+16, ms)
	}
	for share := 1.0; share >= least; share /= 10 {
		fmt.Fprintf(&b, `<path d="M%d %.1f H%d" stroke="#ddd"/><text x="%d" y="%.1f" text-anchor="end">%g %%</text>`+"\n", left, y(share), width-right, left-6, y(share)+4, share*100)
	}
	fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="middle">latency above … ms</text>`+"\n", (left+width-right)/2, height-12)
	colours := []string{"#0a6", "#0a6", "#36c", "#36c"}
	for i, c := range curves {
		t := slices.Sorted(slices.Values(c.times))
		var points []string
		for j, d := range t {
			points = append(points, fmt.Sprintf("%.1f,%.1f", x(float64(d.Microseconds())/1000), y(1-float64(j)/float64(len(t)))))
		}
		dash := ""
		if !c.solid {
			dash = ` stroke-dasharray="5 4"`
		}
		colour := colours[i%len(colours)]
		fmt.Fprintf(&b, `<polyline points="%s" fill="none" stroke="%s" stroke-width="2"%s/>`+"\n", strings.Join(thin(points), " "), colour, dash)
		at := top + 20 + 22*i
		fmt.Fprintf(&b, `<path d="M%d %d h26" stroke="%s" stroke-width="2"%s/><text x="%d" y="%d">%s</text>`+"\n", width-right+14, at, colour, dash, width-right+46, at+4, c.name)
	}
	b.WriteString("</svg>\n")
	return []byte(b.String())
}

// thin removes indistinguishable points, and keeps the whole tail.
func thin(points []string) (out []string) {
	const tail, most = 200, 400
	step := max(1, (len(points)-tail)/most)
	for i := 0; i < len(points); i++ {
		if i%step == 0 || i >= len(points)-tail {
			out = append(out, points[i])
		}
	}
	return out
}
