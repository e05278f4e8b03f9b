// SPDX-License-Identifier: Apache-2.0

// Package topo holds a network as its routing protocol sees it: routers, the adjacencies between them with
// their metrics, what fails together, and the SRv6 functions that repairs may use. It reads networks from
// GraphML (the Topology Zoo's dialect), node-link JSON (networkx, topohub), the databases that FRR's isisd and
// ospf6d print, and a form of weir's own that knows everything a plan can use.
package topo

import (
	"fmt"
	"net/netip"
	"slices"
)

// maxMetric is the largest metric of one adjacency: that of IS-IS (RFC 5305 section 3), whose 24 bits leave
// room for the sums of any path in 64.
const maxMetric = 1<<24 - 2

// Network is one routing domain.
type Network struct {
	Name  string
	Nodes []Node
	Links []Link
	// Self is the name of the router whose daemon printed the database; "" if the source does not say.
	Self string
	// Geographic says that positions are longitudes and latitudes in degrees.
	Geographic bool
	// Notes tell what of the source is not in the network, and why, a sentence each.
	Notes []string
}

// Node is a router.
type Node struct {
	Name     string
	At       *Point         // where a picture shows it; nil if the source does not say
	Overload bool           // others do not route through it (IS-IS overload bit; OSPFv3 without the R bit)
	Prefixes []netip.Prefix // that it announces
	// Metrics are those of prefixes, which count where several routers announce the same; 0 where there is no entry.
	Metrics map[netip.Prefix]uint32
	// SIDs of RFC 8986; the zero address where it has none.
	End, DT6, DT4 netip.Addr // End (section 4.1), End.DT6 (4.6), End.DT4 (4.7); an End.DT46 (4.8) stands for both of these
	// Locator is the prefix of its SIDs; invalid if the source does not say.
	Locator netip.Prefix
}

// Point is a position; y grows to the north.
type Point struct{ X, Y float64 }

// Link is one direction of an adjacency. Parallel ones differ in their index only.
type Link struct {
	From, To int    // indices in Nodes
	Metric   uint32 // 1 to maxMetric
	Reverse  int    // index in Links of the other direction, which fails with this one
	// LAN names the medium if more than two routers may share it: the adjacencies of one router on one LAN
	// use one interface, and fail with it.
	LAN           string
	SRLGs         []string   // shared-risk groups: what also fails when this fails (RFC 4202 section 2.3)
	Interface     string     // of From; "" if the source does not say
	Local, Remote netip.Addr // interface addresses of From and To, where known
	EndX, DX6     netip.Addr // From's End.X and End.DX6 SIDs (RFC 8986 sections 4.2, 4.4) for it, where there are such
}

// Node finds a router by its name, or -1.
func (n *Network) Node(name string) int {
	return slices.IndexFunc(n.Nodes, func(x Node) bool { return x.Name == name })
}

// HasSIDs tells whether the source names any SID: a plan then uses no other segments than those.
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

// LinkName is how people call a direction of an adjacency: "a→b", with the interface where it is known or else a
// number where several are parallel.
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

// Check tells what is wrong with a network that was not read but made.
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
			return fmt.Errorf("network %s: link %s has metric %d: 1 to %d are possible", n.Name, n.LinkName(i), l.Metric, maxMetric)
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
