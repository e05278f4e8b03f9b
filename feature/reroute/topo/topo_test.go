// SPDX-License-Identifier: Apache-2.0

package topo_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/reroute/topo"
)

// shared is a directory of real networks beside the developers' checkout.
const shared = "../../../../shared/data/topologies"

const own = `name: small
nodes:
  - {name: a, position: [1, 2], end: fc00:1::1, dt6: fc00:1::d6, prefixes: [2001:db8:1::/48]}
  - {name: b, overload: true}
  - {name: c}
links:
  - {from: a, to: b, metric: 5, interface: eth0, endx: fc00:1::b, srlg: [duct], back: {metric: 7, interface: eth9}}
  - {from: a, to: b, metric: 6}
  - {from: b, to: c, lan: hall}
`

const graphML = `<?xml version="1.0"?><graphml xmlns="http://graphml.graphdrawing.org/xmlns">
<key attr.name="label" attr.type="string" for="node" id="d1"/><key attr.name="Longitude" for="node" id="d2"/>
<key attr.name="Latitude" for="node" id="d3"/><key attr.name="weight" for="edge" id="d4"/><key attr.name="Network" for="graph" id="d5"/>
<graph edgedefault="undirected"><data key="d5">Old &amp; New</data>
<node id="0"><data key="d1">?</data><data key="d2">7.5</data><data key="d3">50.5</data></node>
<node id="1"><data key="d1">?</data></node><node id="2"/>
<edge source="0" target="1"><data key="d4">2.6</data></edge><edge source="0" target="1"/><edge source="1" target="1"/><edge source="1" target="2"/>
</graph></graphml>`

const nodeLink = `{"directed": true, "graph": {"name": "g"}, "nodes": [{"id": 0, "name": "A", "pos": [7, 50]}, {"id": "x"}, {"id": 2}],
 "edges": [{"source": 0, "target": "x", "dist": 0.2}, {"source": "x", "target": 0, "dist": 12.5, "metric": 4}, {"source": 2, "target": 0}]}`

// show formats a network, one element per line.
func show(n *topo.Network) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s geographic=%v\n", n.Name, n.Geographic)
	for _, x := range n.Nodes {
		fmt.Fprintf(&b, "%s", x.Name)
		if x.At != nil {
			fmt.Fprintf(&b, " at %g %g", x.At.X, x.At.Y)
		}
		if x.Overload {
			b.WriteString(" overload")
		}
		if x.End.IsValid() {
			fmt.Fprintf(&b, " %s %s %v", x.End, x.DT6, x.Prefixes)
		}
		b.WriteByte('\n')
	}
	for i, l := range n.Links {
		fmt.Fprintf(&b, "%s %d", n.LinkName(i), l.Metric)
		if l.LAN != "" {
			b.WriteString(" on " + l.LAN)
		}
		if l.EndX.IsValid() {
			fmt.Fprintf(&b, " %s", l.EndX)
		}
		for _, s := range l.SRLGs {
			b.WriteString(" risk " + s)
		}
		b.WriteByte('\n')
	}
	for _, s := range n.Notes {
		b.WriteString("note: " + s + "\n")
	}
	return b.String()
}

func TestRead(t *testing.T) {
	for _, c := range []struct{ name, text, want string }{
		{"own", own, `small geographic=false
a at 1 2 fc00:1::1 fc00:1::d6 [2001:db8:1::/48]
b overload
c
a→b (eth0) 5 fc00:1::b risk duct
b→a (eth9) 7 risk duct
a→b #2 6
b→a #2 6
b→c 1 on hall
c→b 1 on hall
note: 1 of 3 links have no metric (b to c): each gets 1
`},
		{"graphml", graphML, `Old & New geographic=true
? at 7.5 50.5
? (1)
2
?→? (1) #1 3
? (1)→? #1 3
?→? (1) #2 1
? (1)→? #2 1
? (1)→2 1
2→? (1) 1
note: a link of ? (1) to itself is omitted
note: 2 of 3 links have no metric (metric, weight, cost, dist): each gets 1
note: 1 of 3 links have a rounded metric, because theirs is no whole number from 1 (0 to 1: 2.6 is 3): repairs may follow other paths than routing; scale metrics as the routers do
`},
		{"node-link", nodeLink, `g geographic=true
A at 7 50
x
2
A→x 1
x→A 4
note: 1 of 3 links have no metric (metric, weight, cost, dist): each gets 1
note: 1 of 3 links have a rounded metric, because theirs is no whole number from 1 (0 to x: 0.2 is 1): repairs may follow other paths than routing; scale metrics as the routers do
note: 2→A is announced by 2 only and omitted
`},
	} {
		n, err := topo.Read(c.name, []byte(c.text))
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if got := show(n); got != c.want {
			t.Errorf("%s: got\n%s\nwant\n%s", c.name, got, c.want)
		}
	}
}

// Errors carry their position.
func TestErrors(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"", "f:1:1: the file is empty"},
		{"nodes: [{name: a}]\nlinks:\n  - {from: a, to: b}\n", `f:3:5: there is no node "b"`},
		{"nodes: [{name: core1}, {name: core2}]\nlinks:\n  - {from: core1, to: coer2}\n", `f:3:5: there is no node "coer2"; did you mean "core2"?`},
		{"nodes: [{name: a}, {name: a}]\n", "f:1:20: node a exists already"},
		{"nodes:\n  - {nam: a}\n", `f:2:6: nodes[0]: unknown key "nam"; did you mean "name"?`},
		{"nodes: [{name: a}, {name: b}]\nlinks:\n  - {from: a, to: b, metric: 16777215}\n", "f:3:30: metric 16777215: use 1 to 16777214"},
		{"nodes: [{name: a, end: 192.0.2.1}]\n", "no SID"},
		{"nodes:\n  - {name: a, end: 'fc00::1'}\n  - {name: b, end: 'fc00::1'}\n", "f:3:20: end of node b has the SID fc00::1, as has the end of node a"},
		{"nodes:\n  - {name: a, end: 'fc00::1', dt6: 'fc00::1'}\n", "f:2:36: dt6 of node a has the SID "},
		{"nodes: [{name: a, end: 'fc00::1'}, {name: b}]\nlinks:\n  - {from: a, to: b, back: {endx: 'fc00::1'}}\n", "f:3:28: endx of link b→a has the SID "},
		{"nodes:\n  - {name: \"a\\x1b[2J\"}\n", `f:2:12: node "a\x1b[2J": the name has the character U+001B`},
		{"nodes:\n  - {name: \"a\\u202eb\"}\n", "f:2:12: node \"a\\u202eb\": the name has the character U+202E"},
		{"nodes:\n  - {name: \"a \"}\n", "f:2:12: node \"a \": the name begins or ends with a blank"},
		{"nodes: [{name: a}, {name: b}]\nlinks:\n  - {from: a, to: b, srlg: [\"x\\ny\"]}\n", "f:3:28: srlg \"x\\ny\": the name has the character U+000A"},
		{"{\"directed\": false, \"nodes\": [{\"id\": \"a\\u0007\"}], \"edges\": []}", "the name has the character U+0007"},
		{"<graphml><graph></graphml>", "f:1: no GraphML"},
		{"<graphml><graph><node id='a'/><edge source='a' target='b'/></graph></graphml>", `f: edge 1: there is no node "b"`},
		{"<graphml/>", "f: 0 graphs, want one"},
		{`{"directed": false, "nodes": [{"id": 1}, {"id": 1}], "edges": []}`, `f: node 2: two nodes have the id "1"`},
		{"{\"directed\": false,\n\"nodes\": 5}", "f:2: no node-link JSON"},
		{`{"directed": false, "nodes": [{"id": 1},{"id": 2}], "edges": [{"source": 1, "target": 2, "dist": -4}]}`, "metric -4"},
		{`{"areas": []}`, topo.ISISCommand},
		{`{"areaScopedLinkStateDb": []}`, topo.OSPF6Command},
		{"IS-IS Level-2 link-state database:\n", "the database has no LSP"},
		{"IS-IS Level-2 link-state database:\nr1.00-00 * 36 0x00000002 0xa21a 1134 0/0/0\n", "f:2: the system id of r1 is unknown: use the output of vtysh"},
	} {
		_, err := topo.Read("f", []byte(c.text))
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q: got %v, want %q", c.text, err, c.want)
		}
	}
}

// The real networks are read as described in their README.
func TestRealFiles(t *testing.T) {
	files, _ := filepath.Glob(filepath.Join(shared, "*", "*.*"))
	if len(files) == 0 {
		t.Skip("the real networks are not on this machine")
	}
	for _, file := range files {
		n, err := topo.ReadFile(file)
		if err != nil {
			t.Error(err)
			continue
		}
		placed := 0
		for _, x := range n.Nodes {
			if x.At != nil {
				placed++
			}
		}
		if len(n.Nodes) < 10 || len(n.Links) < 2*len(n.Nodes)-2 || placed < len(n.Nodes)/2 {
			t.Errorf("%s: %d nodes, %d placed, %d links", file, len(n.Nodes), placed, len(n.Links)/2)
		}
	}
	if len(files) != 32 {
		t.Errorf("%d files, want 32", len(files))
	}
}

// Stored output of real FRR 8.4.4: a router with parallel links, and the same network by OSPFv3.
func TestKeptDatabases(t *testing.T) {
	for _, c := range []struct {
		file         string
		nodes, links int
	}{{"isis.txt", 4, 10}, {"ospf6.json", 4, 10}} {
		n, err := topo.ReadFile(filepath.Join("testdata", c.file))
		if err != nil {
			t.Error(err)
		} else if len(n.Nodes) != c.nodes || len(n.Links) != c.links {
			t.Errorf("%s:\n%s", c.file, show(n))
		}
	}
}

// SRv6 SIDs as printed by later FRR; 8.4 has none.
func TestISISSIDs(t *testing.T) {
	text, err := os.ReadFile("testdata/isis.txt")
	if err != nil {
		t.Fatal(err)
	}
	n, err := topo.Read("isis", []byte(strings.Replace(string(text), "    Remote Interface IPv6 Address(es): fd00:1::2\n",
		"    Remote Interface IPv6 Address(es): fd00:1::2\n    SRv6 End.X SID: fc00:1:e000::, Algorithm: SPF, Weight: 0, Endpoint Behavior: End.X, Flags: B:0, S:0, P:0\n", 1)))
	if err != nil || !n.HasSIDs() {
		t.Fatal(err)
	}
	for i, l := range n.Links {
		if want := l.Remote.IsValid() && l.Remote.String() == "fd00:1::2"; want != l.EndX.IsValid() {
			t.Errorf("%s: End.X %s", n.LinkName(i), l.EndX)
		}
	}
}

func FuzzRead(f *testing.F) {
	for _, text := range []string{own, graphML, nodeLink} {
		f.Add([]byte(text))
	}
	for _, file := range []string{"isis.txt", "ospf6.json"} {
		text, err := os.ReadFile(filepath.Join("testdata", file))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		n, err := topo.Read("f", text)
		if err != nil {
			return
		}
		if err := n.Check(); err != nil {
			t.Error(err)
		}
		_ = show(n)
	})
}
