// SPDX-License-Identifier: Apache-2.0

// Package topo models a network as its routing protocol does: routers, adjacencies with metrics, shared risks, and
// SRv6 functions for repairs. It reads GraphML (the Topology Zoo's dialect), node-link JSON (networkx, topohub), and
// the databases printed by FRR's isisd and ospf6d. Weir's own format has everything a plan can use.
package topo

import (
	"fmt"
	"net/netip"
	"slices"
)

// maxMetric is IS-IS' largest metric of an adjacency (RFC 5305 section 3). With 24 bits the sum of any path fits in
// 64.
const maxMetric = 1<<24 - 2

// Network is one routing domain.
type Network struct {
	Name  string
	Nodes []Node
	Links []Link
	// Self is the router whose daemon printed the database; "" if unknown.
	Self string
	// Geographic reports positions in degrees of longitude and latitude.
	Geographic bool
	// Notes list the omitted parts of the source with reasons, a sentence each.
	Notes []string
}

// Node is a router.
type Node struct {
	Name     string
	At       *Point         // position in pictures; nil if unknown
	Overload bool           // others do not route through it (IS-IS overload bit; OSPFv3 without the R bit)
	Prefixes []netip.Prefix // announced by it
	// Metrics are the metrics of prefixes, for prefixes of several routers; 0 without an entry.
	Metrics map[netip.Prefix]uint32
	// SIDs of RFC 8986; the zero address if missing.
	End, DT6, DT4 netip.Addr // End (section 4.1), End.DT6 (4.6), End.DT4 (4.7); an End.DT46 (4.8) is both of the latter
	// Locator is the prefix of its SIDs; invalid if unknown.
	Locator netip.Prefix
}

// Point is a position; y grows to the north.
type Point struct{ X, Y float64 }

// Link is one direction of an adjacency. Parallel ones differ in their index only.
type Link struct {
	From, To int    // indices in Nodes
	Metric   uint32 // 1 to maxMetric
	Reverse  int    // index in Links of the other direction; both fail together
	// LAN names the medium if more than two routers may share it. A router's adjacencies on one LAN use one interface
	// and fail with it.
	LAN           string
	SRLGs         []string   // shared-risk groups, failing together (RFC 4202 section 2.3)
	Interface     string     // of From; "" if unknown
	Local, Remote netip.Addr // interface addresses of From and To, if known
	EndX, DX6     netip.Addr // From's End.X and End.DX6 SIDs (RFC 8986 sections 4.2, 4.4) for it, if any
}

// Node returns the index of a router, or -1.
func (n *Network) Node(name string) int {
	return slices.IndexFunc(n.Nodes, func(x Node) bool { return x.Name == name })
}

// HasSIDs reports whether the source has any SID. A plan then uses only these.
func (n *Network) HasSIDs() bool {
	return slices.ContainsFunc(n.Nodes, func(x Node) bool { return x.End.IsValid() || x.DT6.IsValid() || x.DT4.IsValid() }) ||
		slices.ContainsFunc(n.Links, func(l Link) bool { return l.EndX.IsValid() || l.DX6.IsValid() })
}

// SRLGs lists the shared-risk groups of all links, sorted.
func (n *Network) SRLGs() []string {
	var all []string
	for _, l := range n.Links {
		all = append(all, l.SRLGs...)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// LinkName formats a direction of an adjacency: "a→b", with the interface if known, else with a number for parallel
// ones.
func (n *Network) LinkName(link int) string {
	l := n.Links[link]
	name := n.Nodes[l.From].Name + "→" + n.Nodes[l.To].Name
	if l.Interface != "" {
		return name + " (" + l.Interface + ")"
	}
	before, all := 0, 0
	for i := range n.Links {
		if o := &n.Links[i]; o.From == l.From && o.To == l.To {
			all++
			if i < link {
				before++
			}
		}
	}
	if all > 1 {
		name += fmt.Sprintf(" #%d", before+1)
	}
	return name
}

// Check validates a network built in code.
func (n *Network) Check() error {
	names := map[string]bool{}
	for _, x := range n.Nodes {
		if x.Name == "" || names[x.Name] {
			return fmt.Errorf("network %s: two nodes are named %q: names must differ", n.Name, x.Name)
		}
		names[x.Name] = true
		if err := checkName("node", x.Name); err != nil {
			return fmt.Errorf("network %s: %w", n.Name, err)
		}
	}
	for i, l := range n.Links {
		switch {
		case l.From < 0 || l.From >= len(n.Nodes) || l.To < 0 || l.To >= len(n.Nodes) || l.From == l.To:
			return fmt.Errorf("network %s: link %d joins nodes %d and %d of %d", n.Name, i, l.From, l.To, len(n.Nodes))
		case l.Metric < 1 || l.Metric > maxMetric:
			return fmt.Errorf("network %s: link %s has metric %d: use 1 to %d", n.Name, n.LinkName(i), l.Metric, maxMetric)
		case l.Reverse < 0 || l.Reverse >= len(n.Links) || n.Links[l.Reverse].Reverse != i ||
			n.Links[l.Reverse].From != l.To || n.Links[l.Reverse].To != l.From:
			return fmt.Errorf("network %s: link %s is not the other direction of its reverse", n.Name, n.LinkName(i))
		}
		if err := n.Links[i].checkNames(); err != nil {
			return fmt.Errorf("network %s: link %s: %w", n.Name, n.LinkName(i), err)
		}
	}
	if err := n.checkSIDs(); err != nil {
		return fmt.Errorf("network %s: %w", n.Name, err)
	}
	return nil
}
