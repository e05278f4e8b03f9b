// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/weir-project/weir/feature/reroute/topo"
)

// Name describes the failure.
func (f Failure) Name(n *topo.Network) string {
	if f.Mode == Node {
		return "node " + n.Nodes[f.Node].Name
	}
	of := f.Local
	if len(of) == 0 { // elsewhere in the network
		of = f.Links[:1]
	}
	name := n.LinkName(of[0])
	if f.Mode == SRLG {
		var groups []string
		for _, l := range of {
			groups = append(groups, n.Links[l].SRLGs...)
		}
		slices.Sort(groups)
		if groups = slices.Compact(groups); len(groups) > 0 {
			name += " and its risk group " + strings.Join(groups, ", ")
		}
	}
	return name
}

// ListName formats a segment list: routers by name, adjacencies as "a→b", in order of travel.
func ListName(n *topo.Network, segments []Segment) string {
	var out []string
	for _, s := range segments {
		if s.Link < 0 {
			out = append(out, n.Nodes[s.Node].Name)
		} else {
			out = append(out, n.LinkName(s.Link))
		}
	}
	return strings.Join(out, ", ")
}

// SIDs returns a repair's list for a segment routing header around the packet (H.Encaps), in order of travel. The
// last SID removes the header, because Linux drops End and End.X without a next segment.
//
// For a last End, this is End.DT6 of the same router. For a last End.X it is End.DX6, or an additional End.DT6 of the
// router behind the adjacency or of the destination. A repair without segments has none; its packets stay unchanged.
func (r Repair) SIDs(n *topo.Network) ([]netip.Addr, error) {
	var out []netip.Addr
	for i, s := range r.Segments {
		last := i == len(r.Segments)-1
		node := n.Nodes[s.Node]
		var sid, after netip.Addr
		switch {
		case s.Link < 0:
			if sid = node.End; last {
				after = n.Nodes[r.Destination].DT6
				if node.DT6.IsValid() {
					sid, after = node.DT6, netip.Addr{}
				}
			}
		case last && n.Links[s.Link].DX6.IsValid():
			sid = n.Links[s.Link].DX6
		default:
			if sid = n.Links[s.Link].EndX; last {
				if after = n.Nodes[n.Links[s.Link].To].DT6; !after.IsValid() {
					after = n.Nodes[r.Destination].DT6
				}
			}
		}
		if !sid.IsValid() {
			return nil, fmt.Errorf("%s has no SID in the topology", ListName(n, r.Segments[i:i+1]))
		}
		out = append(out, sid)
		if last && after.IsValid() {
			out = append(out, after)
		} else if last && sid != node.DT6 && (s.Link < 0 || sid != n.Links[s.Link].DX6) {
			return nil, fmt.Errorf("no router behind %s has an End.DT6 SID in the topology: nothing would remove the header",
				ListName(n, r.Segments[i:i+1]))
		}
	}
	return out, nil
}

// sids4 returns the list for IPv4 packets: the list of [Repair.SIDs] with End.DT4 of the same router in place of
// End.DT6. In place of End.DX6 it has End.X, and End.DT4 of the next router.
func (r Repair) sids4(n *topo.Network) ([]netip.Addr, error) {
	out, err := r.SIDs(n)
	if err != nil || len(out) == 0 {
		return nil, err
	}
	out = slices.Clone(out)
	s := r.Segments[len(r.Segments)-1]
	at := s.Node
	if s.Link >= 0 {
		at = n.Links[s.Link].To
		if l := n.Links[s.Link]; l.DX6.IsValid() {
			if !l.EndX.IsValid() {
				return nil, fmt.Errorf("%s has no End.X SID in the topology: its End.DX6 is for IPv6 packets", n.LinkName(s.Link))
			}
			out = append(out[:len(out)-1], l.EndX, netip.Addr{})
		}
	}
	if !n.Nodes[at].DT6.IsValid() && !(s.Link >= 0 && n.Links[s.Link].DX6.IsValid()) {
		at = r.Destination // the header of IPv6 packets is removed there
	}
	if !n.Nodes[at].DT4.IsValid() {
		return nil, fmt.Errorf("%s has no End.DT4 SID in the topology", n.Nodes[at].Name)
	}
	out[len(out)-1] = n.Nodes[at].DT4
	return out, nil
}

// InlineSIDs returns a repair's list for a segment routing header inserted into the packet, in order of travel: End
// and End.X only. The caller appends the packet's own destination as the last segment. Nothing removes the header. So
// all routers must forward such packets, and the destination must accept a segment routing header (seg6_enabled of
// its interface).
func (r Repair) InlineSIDs(n *topo.Network) ([]netip.Addr, error) {
	var out []netip.Addr
	for i, s := range r.Segments {
		sid := n.Nodes[s.Node].End
		if s.Link >= 0 {
			sid = n.Links[s.Link].EndX
		}
		if !sid.IsValid() {
			return nil, fmt.Errorf("%s has no SID in the topology", ListName(n, r.Segments[i:i+1]))
		}
		out = append(out, sid)
	}
	return out, nil
}

// Path returns the routers on one of a repair's paths, starting with the planning router. Among equal paths it
// follows the first link of each router.
func (p *Planner) Path(from int, r Repair) []int {
	g := p.g
	path := []int{from, g.Links[r.Out].To}
	native := func(to int) {
		for path[len(path)-1] != to {
			at := int32(path[len(path)-1])
			i := slices.IndexFunc(g.out(at), func(l int32) bool { return g.uses(l, int32(to)) })
			if i < 0 || len(path) > len(g.Nodes)*(len(r.Segments)+2) {
				return // not a repair of this network
			}
			path = append(path, g.Links[g.out(at)[i]].To)
		}
	}
	for _, s := range r.Segments {
		native(s.Node)
		if s.Link >= 0 {
			path = append(path, g.Links[s.Link].To)
		}
	}
	native(r.Destination)
	return path
}
