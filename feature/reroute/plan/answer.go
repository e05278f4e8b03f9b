// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/weir-project/weir/feature/reroute/topo"
	"github.com/weir-project/weir/internal/suggest"
)

// Question asks for the plans of one router or all, for one destination or all.
type Question struct {
	Node, Destination string // names; "" for all
	// Summary omits the rows: a large network has millions.
	Summary bool
	// Change asks for detours instead: Node's handling of packets while routers learn of a failure anywhere.
	Change   Change
	Progress func(done, total int) // routers, or failures of a change; nil: nobody waits
	Options
}

// Change is a change of a network.
type Change string

const (
	None Change = ""
	Down Change = "down" // a failure
	Up   Change = "up"   // its end
)

// Answer is the answer to a question.
type Answer struct {
	Network     string           `json:"network"`
	Nodes       int              `json:"nodes"`
	Links       int              `json:"links"`
	Mode        Mode             `json:"protect"`
	Change      Change           `json:"change,omitempty"`
	Repairs     []RepairRow      `json:"repairs"`
	Unprotected []UnprotectedRow `json:"unprotected"`
	Notes       []string         `json:"notes,omitempty"`
	Routers     []RouterRow      `json:"routers"`

	Planner *Planner `json:"-"`
	longest *Repair  // with the most segments
	of      *Plan    // its plan
}

// RouterRow counts the repairs of one router.
type RouterRow struct {
	Node        string `json:"node"`
	Repairs     int    `json:"repairs"`
	Segments    []int  `json:"by_segments"` // repairs by the length of their lists
	Unprotected int    `json:"unprotected"`
}

// RepairRow is a repair with names.
type RepairRow struct {
	Node        string       `json:"node"`
	Failure     string       `json:"failure"`
	Protects    Mode         `json:"protects"`
	Destination string       `json:"destination"`
	FirstHop    string       `json:"first_hop"` // the router
	Interface   string       `json:"interface,omitempty"`
	NextHop     netip.Addr   `json:"next_hop,omitzero"` // its address, if in the topology
	Out         string       `json:"out"`               // the link
	Segments    []string     `json:"segments"`
	SIDs        []netip.Addr `json:"sids,omitempty"`
	SIDs4       []netip.Addr `json:"sids4,omitempty"` // for IPv4 packets
	InlineSIDs  []netip.Addr `json:"inline_sids,omitempty"`
	Problem     string       `json:"problem,omitempty"`  // why the segments have no SIDs
	Problem4    string       `json:"problem4,omitempty"` // why they have none for IPv4 packets
	Metric      uint64       `json:"metric"`
	Path        []string     `json:"path"`

	Repair Repair `json:"-"`
	Plan   *Plan  `json:"-"`
}

// UnprotectedRow is a destination without a repair, with names.
type UnprotectedRow struct {
	Node        string `json:"node"`
	Failure     string `json:"failure"`
	Destination string `json:"destination"`
	Reason      Reason `json:"reason"`
}

// ErrNoNode reports an unknown router in a question.
var ErrNoNode = errors.New("no such node")

// Ask computes an answer. Rows are ordered by router, failure and destination.
func Ask(n *topo.Network, q Question) (*Answer, error) {
	node, err := find(n, q.Node)
	if err != nil {
		return nil, err
	}
	destination, err := find(n, q.Destination)
	if err != nil {
		return nil, err
	}
	a := &Answer{Network: n.Name, Nodes: len(n.Nodes), Links: len(n.Links) / 2, Mode: q.Mode, Notes: n.Notes, Planner: New(n),
		Repairs: []RepairRow{}, Unprotected: []UnprotectedRow{}, Routers: []RouterRow{}}
	if a.Change = q.Change; q.Change != None {
		return a, a.detours(n, node, destination, q.progress)
	}
	for i := range n.Nodes {
		if node >= 0 && i != node {
			continue
		}
		p, err := a.Planner.Plan(i, q.Options)
		if err != nil {
			return nil, err
		}
		a.add(p, destination, q.Summary)
		q.progress(i+1, len(n.Nodes))
	}
	return a, nil
}

func (q Question) progress(done, total int) {
	if q.Progress != nil {
		q.Progress(done, total)
	}
}

// add counts a plan's repairs and adds its rows.
func (a *Answer) add(p *Plan, destination int, summary bool) {
	row := RouterRow{Node: p.Network.Nodes[p.Node].Name, Segments: []int{}}
	for i, r := range p.Repairs {
		if destination >= 0 && r.Destination != destination {
			continue
		}
		row.Repairs++
		for len(row.Segments) <= len(r.Segments) {
			row.Segments = append(row.Segments, 0)
		}
		row.Segments[len(r.Segments)]++
		if a.longest == nil || len(r.Segments) > len(a.longest.Segments) {
			a.longest, a.of = &p.Repairs[i], p
		}
		if !summary {
			a.Repairs = append(a.Repairs, a.row(p, r))
		}
	}
	for _, u := range p.Unprotected {
		if destination >= 0 && u.Destination != destination {
			continue
		}
		row.Unprotected++
		if !summary {
			a.Unprotected = append(a.Unprotected, UnprotectedRow{row.Node, p.Failures[u.Failure].Name(p.Network), p.Network.Nodes[u.Destination].Name, u.Reason})
		}
	}
	if row.Repairs+row.Unprotected > 0 {
		a.Routers = append(a.Routers, row)
	}
}

// detours adds one router's detours during changes to the answer.
func (a *Answer) detours(n *topo.Network, node, destination int, progress func(done, total int)) error {
	if node < 0 {
		return errors.New("detours are planned for one router: name it with --node")
	}
	if a.Change != Up && a.Change != Down {
		return fmt.Errorf("unknown change %q: use down or up", a.Change)
	}
	failures := a.Planner.everywhere(a.Mode)
	p := &Plan{Network: n, Node: node, Mode: a.Mode, Failures: failures}
	for i, f := range failures {
		detours, missing := a.Planner.Detours(node, f, a.Change == Up)
		for _, d := range detours {
			p.Repairs = append(p.Repairs, Repair{Failure: i, Protects: a.Mode, Destination: d.Destination, Out: d.Out, Segments: d.Segments, Metric: d.Metric})
		}
		for _, d := range missing {
			p.Unprotected = append(p.Unprotected, Unprotected{i, d, MissingSIDs})
		}
		progress(i+1, len(failures))
	}
	a.add(p, destination, false)
	return nil
}

func find(n *topo.Network, name string) (int, error) {
	if name == "" {
		return -1, nil
	}
	if i := n.Node(name); i >= 0 {
		return i, nil
	}
	names := make([]string, len(n.Nodes))
	for i, x := range n.Nodes {
		names[i] = x.Name
	}
	if near := suggest.Nearest(name, names); near != "" {
		return -1, fmt.Errorf("%w in %s: %q; did you mean %q?", ErrNoNode, n.Name, name, near)
	}
	return -1, fmt.Errorf("%w in %s: %q; its %d nodes have names like %q", ErrNoNode, n.Name, name, len(names), names[0])
}

func (a *Answer) row(p *Plan, r Repair) RepairRow {
	n := p.Network
	out := RepairRow{Node: n.Nodes[p.Node].Name, Failure: p.Failures[r.Failure].Name(n), Protects: r.Protects,
		Destination: n.Nodes[r.Destination].Name, FirstHop: n.Nodes[n.Links[r.Out].To].Name, Interface: n.Links[r.Out].Interface, NextHop: n.Links[r.Out].Remote,
		Out: n.LinkName(r.Out), Segments: []string{}, Metric: r.Metric, Repair: r, Plan: p}
	for i := range r.Segments {
		out.Segments = append(out.Segments, ListName(n, r.Segments[i:i+1]))
	}
	if n.HasSIDs() {
		var err error
		if out.SIDs, err = r.SIDs(n); err != nil {
			out.Problem = err.Error()
		} else if out.SIDs4, err = r.sids4(n); err != nil {
			out.Problem4 = err.Error()
		}
		out.InlineSIDs, _ = r.InlineSIDs(n) // errors are the same as above
	}
	for _, x := range a.Planner.Path(p.Node, r) {
		out.Path = append(out.Path, n.Nodes[x].Name)
	}
	return out
}

// Longest returns the first repair with the most segments; ok is false if there is none.
func (a *Answer) Longest() (row RepairRow, ok bool) {
	if a.longest == nil {
		return row, false
	}
	return a.row(a.of, *a.longest), true
}

// Native returns the routers of one path before any failure.
func (p *Planner) Native(from, to int) []int {
	g := p.g
	path := []int{from}
	for at := int32(from); at != int32(to); at = int32(path[len(path)-1]) {
		next := -1
		for _, l := range g.out(at) {
			if g.uses(l, int32(to)) {
				next = g.Links[l].To
				break
			}
		}
		if next < 0 {
			return nil
		}
		path = append(path, next)
	}
	return path
}

// Distance returns the metric of the shortest paths between two routers before any failure.
func (p *Planner) Distance(from, to int) uint64 { return p.g.dist(int32(from), int32(to)) }
