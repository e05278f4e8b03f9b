// SPDX-License-Identifier: Apache-2.0

package topo

import (
	"bytes"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// metricNames are the edge attributes holding the metric; the first one found counts. Distances in kilometres
// ("dist") become metrics in steps of one. Without any attribute the metric is 1.
var metricNames = []string{"metric", "weight", "cost", "dist"}

type graphML struct {
	Keys []struct {
		ID   string `xml:"id,attr"`
		For  string `xml:"for,attr"`
		Name string `xml:"attr.name,attr"`
	} `xml:"key"`
	Graphs []struct {
		Directed string        `xml:"edgedefault,attr"`
		Nodes    []graphMLNode `xml:"node"`
		Edges    []graphMLEdge `xml:"edge"`
		Data     []graphMLData `xml:"data"`
	} `xml:"graph"`
}

type graphMLData struct {
	Key   string `xml:"key,attr"`
	Value string `xml:",chardata"`
}

type graphMLNode struct {
	ID   string        `xml:"id,attr"`
	Data []graphMLData `xml:"data"`
}

type graphMLEdge struct {
	Source string        `xml:"source,attr"`
	Target string        `xml:"target,attr"`
	Data   []graphMLData `xml:"data"`
}

// readGraphML reads the subset of GraphML (graphml.graphdrawing.org) written by the Topology Zoo and networkx.
func readGraphML(file string, data []byte) (*Network, error) {
	var doc graphML
	d := xml.NewDecoder(bytes.NewReader(data))
	// Charsets other than UTF-8 and ASCII would need tables.
	d.CharsetReader = func(charset string, r io.Reader) (io.Reader, error) {
		if strings.EqualFold(charset, "us-ascii") || strings.EqualFold(charset, "ascii") {
			return r, nil
		}
		return nil, fmt.Errorf("charset %s: convert the file to UTF-8", charset)
	}
	if err := d.Decode(&doc); err != nil {
		if syntax, ok := errors.AsType[*xml.SyntaxError](err); ok {
			return nil, fmt.Errorf("%s:%d: no GraphML: %s", file, syntax.Line, syntax.Msg)
		}
		return nil, fmt.Errorf("%s: no GraphML: %w", file, err)
	}
	if len(doc.Graphs) != 1 {
		return nil, fmt.Errorf("%s: %d graphs, want one", file, len(doc.Graphs))
	}
	names := map[string]string{} // of keys
	for _, k := range doc.Keys {
		names[k.ID] = k.Name
	}
	attributes := func(data []graphMLData) map[string]string {
		out := map[string]string{}
		for _, d := range data {
			if name := names[d.Key]; name != "" {
				out[name] = strings.TrimSpace(d.Value)
			}
		}
		return out
	}
	g := doc.Graphs[0]
	l := newLoose(attributes(g.Data)["Network"])
	for _, x := range g.Nodes {
		a := attributes(x.Data)
		var at *Point
		lon, err1 := strconv.ParseFloat(a["Longitude"], 64)
		lat, err2 := strconv.ParseFloat(a["Latitude"], 64)
		if err1 == nil && err2 == nil {
			at = &Point{lon, lat}
			l.b.n.Geographic = true
		}
		if err := l.node(x.ID, a["label"], at); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
	}
	for i, e := range g.Edges {
		a := attributes(e.Data)
		var m *float64
		for _, name := range metricNames {
			if text, ok := a[name]; ok {
				v, err := strconv.ParseFloat(text, 64)
				if err != nil {
					return nil, fmt.Errorf("%s: edge %d, %s to %s: %s %q is no number", file, i+1, e.Source, e.Target, name, text)
				}
				m = &v
				break
			}
		}
		if err := l.edge(e.Source, e.Target, m, nil); err != nil {
			return nil, fmt.Errorf("%s: edge %d: %w", file, i+1, err)
		}
	}
	n, err := l.network(g.Directed == "directed")
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return n, nil
}

// loose builds a network from a general format, with an id and an optional label per node.
type loose struct {
	b     *Builder
	ids   map[string]int
	edges []half
	// Number of links without a metric, number of rounded metrics, and an example.
	without, rounded int
	example          string
}

func newLoose(name string) *loose { return &loose{b: NewBuilder(name), ids: map[string]int{}} }

// node adds a node. In the Zoo ids are unique, but labels are not ("?").
func (l *loose) node(id, label string, at *Point) error {
	if id == "" {
		return errors.New("a node has no id")
	}
	if _, twice := l.ids[id]; twice {
		return fmt.Errorf("two nodes have the id %q", id)
	}
	name := label
	if name == "" {
		name = id
	}
	for extra := 0; ; extra++ {
		if _, taken := l.b.byName[name]; !taken {
			break
		}
		name = fmt.Sprintf("%s (%s)", label, id)
		if extra > 0 {
			name += strings.Repeat("'", extra)
		}
	}
	l.ids[id] = l.b.Node(name)
	l.b.At(l.ids[id]).At = at
	return nil
}

// edge adds an edge. Without a metric it gets 1.
func (l *loose) edge(from, to string, given *float64, srlgs []string) error {
	u, ok := l.ids[from]
	if !ok {
		return fmt.Errorf("there is no node %q", from)
	}
	v, ok := l.ids[to]
	if !ok {
		return fmt.Errorf("there is no node %q", to)
	}
	if u == v {
		l.b.note("a link of %s to itself is omitted", l.b.n.Nodes[u].Name)
		return nil
	}
	w := uint32(1)
	if given == nil {
		l.without++
	} else {
		var err error
		if w, err = metric(*given); err != nil {
			return fmt.Errorf("%s to %s: %w", from, to, err)
		}
		if float64(w) != *given {
			if l.rounded++; l.example == "" {
				l.example = fmt.Sprintf("%s to %s: %v is %d", from, to, *given, w)
			}
		}
	}
	l.edges = append(l.edges, half{Link: Link{From: u, To: v, Metric: w, SRLGs: srlgs}})
	return nil
}

func (l *loose) network(directed bool) (*Network, error) {
	if l.without > 0 {
		l.b.note("%d of %d links have no metric (%s): each gets 1", l.without, len(l.edges), strings.Join(metricNames, ", "))
	}
	if l.rounded > 0 {
		l.b.note("%d of %d links have a rounded metric, because theirs is no whole number from 1 (%s): repairs may follow other paths than routing; scale metrics as the routers do",
			l.rounded, len(l.edges), l.example)
	}
	if directed {
		l.b.join(l.edges)
	} else {
		for _, e := range l.edges {
			l.b.Link(e.Link, Link{Metric: e.Metric, SRLGs: e.SRLGs})
		}
	}
	return l.b.Network()
}
