// SPDX-License-Identifier: Apache-2.0

package draw_test

import (
	"bytes"
	"encoding/xml"
	"io"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/reroute/draw"
	"github.com/weir-project/weir/feature/reroute/plan"
	"github.com/weir-project/weir/feature/reroute/topo"
)

const text = `name: "A & <B>"
nodes: [{name: "a<&>"}, {name: b}, {name: c}, {name: d}, {name: alone}]
links:
  - {from: "a<&>", to: b}
  - {from: b, to: c}
  - {from: c, to: d, metric: 5}
  - {from: c, to: d, metric: 6}
  - {from: d, to: "a<&>", metric: 9}
`

func pictures(t *testing.T, mode plan.Mode) (out [][]byte) {
	t.Helper()
	n, err := topo.Read("f", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	a, err := plan.Ask(n, plan.Question{Options: plan.Options{Mode: mode}})
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range a.Repairs {
		out = append(out, draw.Repair(a, row))
	}
	return append(out, draw.SVG(n, draw.Scene{Gone: -1, Out: -1}))
}

// elements counts the elements of a picture. The picture must be well-formed, without NaN or Inf.
func elements(t *testing.T, picture []byte) map[string]int {
	t.Helper()
	if bytes.Contains(picture, []byte("NaN")) || bytes.Contains(picture, []byte("Inf")) {
		t.Errorf("no number:\n%s", picture)
	}
	out := map[string]int{}
	for d := xml.NewDecoder(bytes.NewReader(picture)); ; {
		token, err := d.Token()
		if err == io.EOF {
			return out
		}
		if err != nil {
			t.Fatalf("%v:\n%s", err, picture)
		}
		if e, ok := token.(xml.StartElement); ok {
			out[e.Name.Local]++
		}
	}
}

func TestPictures(t *testing.T) {
	for _, mode := range plan.Modes() {
		all := pictures(t, mode)
		again := pictures(t, mode)
		for i, picture := range all {
			e := elements(t, picture)
			if e["circle"] < 5 || e["path"] < 5 || e["text"] < 5 {
				t.Errorf("%v:\n%s", e, picture)
			}
			if !bytes.Equal(picture, again[i]) {
				t.Error("the same is drawn in two ways")
			}
			if i < len(all)-1 && !strings.Contains(string(picture), "A &amp; &lt;B&gt;: ") {
				t.Errorf("no title:\n%s", picture)
			}
		}
		if len(all) < 3 {
			t.Errorf("%s: %d pictures", mode, len(all))
		}
	}
}

// Networks of any shape have a picture: one router, two at one place, some without a position.
func TestShapes(t *testing.T) {
	for _, text := range []string{
		"nodes: [{name: a}]\n",
		"nodes: [{name: a, position: [3, 4]}]\n",
		"nodes: [{name: a, position: [3, 4]}, {name: b, position: [3, 4]}]\nlinks: [{from: a, to: b}]\n",
		"nodes: [{name: a, position: [3, 4]}, {name: b}, {name: c}]\nlinks: [{from: a, to: b}, {from: b, to: c}]\n",
	} {
		n, err := topo.Read("f", []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		if e := elements(t, draw.SVG(n, draw.Scene{Gone: -1, Out: -1})); e["circle"] != len(n.Nodes) {
			t.Errorf("%q: %v", text, e)
		}
	}
}
