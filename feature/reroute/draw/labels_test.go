// SPDX-License-Identifier: Apache-2.0

package draw_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/reroute/draw"
	"github.com/weir-project/weir/feature/reroute/plan"
	"github.com/weir-project/weir/feature/reroute/topo"
	"github.com/weir-project/weir/internal/picture/picturetest"
)

// dense is a network like those of Europe's carriers: most routers in a few regions, some far away. Each region is a
// ring with chords.
func dense(t *testing.T, routers int) *topo.Network {
	t.Helper()
	r := rand.New(rand.NewPCG(7, 7))
	var b strings.Builder
	b.WriteString("name: dense\nnodes:\n")
	for i := range routers {
		region := i * 5 / routers
		x, y := 8+4*float64(region)+1.2*r.NormFloat64(), 48+2*float64(region%2)+1.1*r.NormFloat64()
		fmt.Fprintf(&b, "  - {name: Router%cat%d, position: [%.3f, %.3f]}\n", 'A'+rune(i%26), i, x, y)
	}
	b.WriteString("  - {name: Capetown, position: [18.4, -33.9]}\n  - {name: NewYork, position: [-74, 40.7]}\nlinks:\n")
	for i := range routers {
		fmt.Fprintf(&b, "  - {from: Router%cat%d, to: Router%cat%d, metric: %d}\n", 'A'+rune(i%26), i, 'A'+rune((i+1)%routers%26), (i+1)%routers, 10+i)
	}
	for _, i := range []int{3, 20, routers - 9} {
		fmt.Fprintf(&b, "  - {from: Router%cat%d, to: Capetown, metric: 50}\n  - {from: Router%cat%d, to: NewYork, metric: 70}\n", 'A'+rune(i%26), i, 'A'+rune((i+4)%26), i+4)
	}
	n, err := topo.Read("f", []byte(b.String()))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// longest draws the longest repair of a network.
func longest(t *testing.T, n *topo.Network) []byte {
	t.Helper()
	a, err := plan.Ask(n, plan.Question{Options: plan.Options{Mode: "link"}})
	if err != nil {
		t.Fatal(err)
	}
	row, ok := a.Longest()
	if !ok {
		t.Fatal("no repair")
	}
	return draw.Repair(a, row)
}

// Names and other texts never lie on each other or on a router, in small and in crowded networks. All routers have
// their name there.
func TestLabelsApart(t *testing.T) {
	networks := map[string]*topo.Network{"dense": dense(t, 70), "denser": dense(t, 120), "large": dense(t, 250)}
	for name, file := range map[string]string{"abilene": "../../../lab/demo/abilene.yaml", "small": ""} {
		src := []byte(text)
		if file != "" {
			var err error
			if src, err = os.ReadFile(file); err != nil {
				t.Fatal(err)
			}
		}
		n, err := topo.Read("f", src)
		if err != nil {
			t.Fatal(err)
		}
		networks[name] = n
	}
	for name, n := range networks {
		t.Run(name, func(t *testing.T) { apart(t, n, longest(t, n)) })
	}
}

func apart(t *testing.T, n *topo.Network, svg []byte) {
	t.Helper()
	for _, problem := range picturetest.Problems(svg) {
		t.Error(problem)
	}
	p, err := picturetest.Read(svg)
	if err != nil {
		t.Fatal(err)
	}
	routers := map[string]bool{}
	for _, x := range n.Nodes {
		routers[x.Name] = true
	}
	named := 0
	for _, text := range p.Texts {
		if !routers[text.Text] {
			continue
		}
		named++
		for _, c := range p.Circles {
			if text.Box.Overlap(c.Box()) > 0 {
				t.Errorf("%q lies on the router at %.0f, %.0f", text.Text, c.X, c.Y)
			}
		}
	}
	if named != len(n.Nodes) {
		t.Errorf("%d of %d routers have a name", named, len(n.Nodes))
	}
}

// A few distant routers do not squeeze the others: nine of ten use most of the width. The picture says so.
func TestDistantRouters(t *testing.T) {
	svg := longest(t, dense(t, 70))
	p, err := picturetest.Read(svg)
	if err != nil {
		t.Fatal(err)
	}
	var x []float64
	for _, c := range p.Circles {
		if c.R == 7 {
			x = append(x, c.X)
		}
	}
	slices.Sort(x)
	if used := (x[len(x)*95/100] - x[len(x)*5/100]) / p.Width; used < 0.6 || math.IsNaN(used) {
		t.Errorf("nine of ten routers use %.0f %% of the width", used*100)
	}
	if !strings.Contains(string(svg), "not to scale") {
		t.Error("the picture does not say that it is not to scale")
	}
}
