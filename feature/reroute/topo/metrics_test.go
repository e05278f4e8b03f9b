// SPDX-License-Identifier: Apache-2.0

package topo_test

import (
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/reroute/topo"
)

// Changed metrics are noted.
func TestMetricNotes(t *testing.T) {
	graph := func(edges string) string {
		return `{"directed": false, "nodes": [{"id": 1}, {"id": 2}, {"id": 3}], "edges": [` + edges + `]}`
	}
	xml := func(weight string) string {
		return `<graphml><key id="w" for="edge" attr.name="weight"/><graph edgedefault="undirected"><node id="1"/><node id="2"/><edge source="1" target="2">` + weight + `</edge></graph></graphml>`
	}
	const nodes = "nodes: [{name: a}, {name: b}, {name: c}]\nlinks:\n  - {from: a, to: b, metric: 5}\n  - {from: b, to: c"
	for _, c := range []struct{ name, text, note string }{
		{"whole numbers", graph(`{"source": 1, "target": 2, "weight": 3}, {"source": 2, "target": 3, "cost": 4.0}`), ""},
		{"fractions", graph(`{"source": 1, "target": 2, "weight": 0.3}, {"source": 2, "target": 3, "dist": 12.5}, {"source": 1, "target": 3, "metric": 7}`),
			"2 of 3 links have a rounded metric, because theirs is no whole number from 1 (1 to 2: 0.3 is 1)"},
		{"zero", graph(`{"source": 1, "target": 2, "weight": 0}`), "1 of 1 links have a rounded metric, because theirs is no whole number from 1 (1 to 2: 0 is 1)"},
		{"none", graph(`{"source": 1, "target": 2}, {"source": 2, "target": 3, "weight": 10}`), "1 of 2 links have no metric (metric, weight, cost, dist): each gets 1"},
		{"another attribute", graph(`{"source": 1, "target": 2, "length": 10}`), "1 of 1 links have no metric"},
		{"GraphML", xml(`<data key="w">3</data>`), ""},
		{"GraphML with a fraction", xml(`<data key="w">2.5</data>`), "(1 to 2: 2.5 is 3)"},
		{"GraphML without", xml(""), "1 of 1 links have no metric"},
		{"weir's own", nodes + ", metric: 7}", ""},
		{"weir's own, without one", nodes + "}", "1 of 2 links have no metric (b to c): each gets 1"},
		{"weir's own, counting hops", strings.Replace(nodes, ", metric: 5", "", 1) + "}", ""},
	} {
		n, err := topo.Read("net", []byte(c.text))
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if notes := strings.Join(n.Notes, "\n"); !strings.Contains(notes, c.note) || c.note == "" && notes != "" {
			t.Errorf("%s: notes %q, want %q", c.name, notes, c.note)
		}
	}
	if _, err := topo.Read("net", []byte(nodes+", metric: 1.5}")); err == nil || !strings.Contains(err.Error(), "net:4:") {
		t.Errorf("a fraction in weir's own form: %v", err)
	}
}

// Names accept any JSON escape.
func TestJSONEscapes(t *testing.T) {
	n, err := topo.Read("net", []byte(`{"directed": false, "nodes": [{"id": "a\/1"}, {"id": "b\ud83d\ude00"}, {"id": "c\u00e9\""}],
"edges": [{"source": "a/1", "target": "b😀", "weight": 1}, {"source": "\u0061\/1", "target": "cé\"", "weight": 1}]}`))
	if err != nil {
		t.Fatal(err)
	}
	if len(n.Links) != 4 || n.Nodes[0].Name != "a/1" || n.Nodes[1].Name != "b😀" || n.Nodes[2].Name != "cé\"" {
		t.Errorf("%+v", n.Nodes)
	}
	n, err = topo.Read("net", []byte(`{"name": "\ud83d\ude00\\/", "nodes": [{"name": "a\/1"}, {"name": "b\u00e9"}], "links": [{"from": "a/1", "to": "bé"}]}`))
	if err != nil || len(n.Links) != 2 || n.Name != `😀\/` {
		t.Errorf("weir's own form: %v", err)
	}
}
