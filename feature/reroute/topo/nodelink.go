// SPDX-License-Identifier: Apache-2.0

package topo

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
)

// nodeLink is the JSON of networkx.node_link_data with topohub's attributes.
type nodeLink struct {
	Directed bool `json:"directed"`
	Graph    struct {
		Name string `json:"name"`
	} `json:"graph"`
	Nodes []struct {
		ID    json.RawMessage `json:"id"`
		Name  string          `json:"name"`
		Label string          `json:"label"`
		Pos   []float64       `json:"pos"`
	} `json:"nodes"`
	Edges []nodeLinkEdge `json:"edges"`
	Links []nodeLinkEdge `json:"links"` // edges in older networkx
}

type nodeLinkEdge struct {
	Source json.RawMessage `json:"source"`
	Target json.RawMessage `json:"target"`
	Metric *float64        `json:"metric"`
	Weight *float64        `json:"weight"`
	Cost   *float64        `json:"cost"`
	Dist   *float64        `json:"dist"`
	SRLG   []string        `json:"srlg"`
}

func readNodeLink(file string, data []byte) (*Network, error) {
	var doc nodeLink
	if err := json.Unmarshal(data, &doc); err != nil {
		return nil, fmt.Errorf("%s: no node-link JSON: %w", withLine(file, data, err), err)
	}
	l := newLoose(doc.Graph.Name)
	degrees := true
	for i, x := range doc.Nodes {
		var at *Point
		if len(x.Pos) == 2 {
			at = &Point{x.Pos[0], x.Pos[1]}
			degrees = degrees && at.X >= -180 && at.X <= 180 && at.Y >= -90 && at.Y <= 90
		}
		label := x.Name
		if label == "" {
			label = x.Label
		}
		if err := l.node(scalar(x.ID), label, at); err != nil {
			return nil, fmt.Errorf("%s: node %d: %w", file, i+1, err)
		}
	}
	l.b.n.Geographic = degrees
	for i, e := range append(doc.Edges, doc.Links...) {
		m := cmp.Or(e.Metric, e.Weight, e.Cost, e.Dist) // as metricNames
		if err := l.edge(scalar(e.Source), scalar(e.Target), m, e.SRLG); err != nil {
			return nil, fmt.Errorf("%s: edge %d: %w", file, i+1, err)
		}
	}
	n, err := l.network(doc.Directed)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return n, nil
}

// scalar returns an id, a number or a string.
func scalar(raw json.RawMessage) string {
	var text string
	if json.Unmarshal(raw, &text) == nil && len(raw) > 0 && raw[0] == '"' {
		return text
	}
	return string(bytes.TrimSpace(raw))
}

// withLine appends the line of a json error to the file's name, if the error has an offset.
func withLine(file string, data []byte, err error) string {
	var offset int64
	if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
		offset = syntax.Offset
	} else if kind, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		offset = kind.Offset
	} else {
		return file
	}
	return fmt.Sprintf("%s:%d", file, 1+bytes.Count(data[:min(int(offset), len(data))], []byte("\n")))
}
