// SPDX-License-Identifier: Apache-2.0

package handofflab

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	draws "github.com/weir-project/weir/internal/picture"
	"github.com/weir-project/weir/lab"
)

// curve is a distribution of latencies.
type curve struct {
	name  string
	solid bool
	times []time.Duration
}

// draw writes the share of requests slower than a time, with logarithmic axes, because the tail matters.
func draw(e *lab.Env, curves []curve) error {
	if err := os.WriteFile(filepath.Join(e.Dir, "handoff-balance.svg"), picture(curves), 0o644); err != nil {
		return fmt.Errorf("the picture: %w", err)
	}
	return nil // --keep DIR keeps it; make results puts it beside the table
}

func picture(curves []curve) []byte {
	p := draws.Plot{
		Title: "Latency with and without moving sessions",
		X:     draws.Axis{Title: "latency of a request", Unit: "ms", Low: 1, High: 10000},
		Y:     draws.Axis{Title: "requests with a higher latency", Unit: "%", Low: 0.0005, High: 1, Scale: 100},
	}
	for i, c := range curves {
		t := slices.Sorted(slices.Values(c.times))
		var points [][2]float64
		for j, d := range t {
			points = append(points, [2]float64{float64(d.Microseconds()) / 1000, 1 - float64(j)/float64(len(t))})
		}
		p.Curves = append(p.Curves, draws.Curve{Name: c.name, Second: i%4 >= 2, Dashed: !c.solid, Points: thin(points)})
	}
	return p.SVG()
}

// thin removes indistinguishable points, and keeps the whole tail.
func thin(points [][2]float64) (out [][2]float64) {
	const tail, most = 200, 400
	step := max(1, (len(points)-tail)/most)
	for i := 0; i < len(points); i++ {
		if i%step == 0 || i >= len(points)-tail {
			out = append(out, points[i])
		}
	}
	return out
}
