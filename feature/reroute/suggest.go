// SPDX-License-Identifier: Apache-2.0

package reroute

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/inventory"
	"github.com/weir-project/weir/kernel"
)

var _ feature.Suggester = Feature{}

// defaultDataPlane is the suggested option --dplaneaddr of bfdd.
const defaultDataPlane = "unix:/run/frr/bfd-dplane"

// Suggest implements feature.Suggester: the BFD sessions of FRR run in the kernel, and judge their links.
func (Feature) Suggest(h inventory.Host) []feature.Suggestion {
	var paths strings.Builder
	var why []string
	for _, n := range h.Namespaces {
		if n.FRR == nil {
			continue
		}
		netns := ""
		if n.Name != "" {
			netns = ", netns: " + feature.Scalar(n.Name)
		}
		peers := judges(n)
		if len(peers) == 0 {
			continue
		}
		fmt.Fprintf(&paths, "  - {name: frr%s, frr: %q}\n", netns, cmp.Or(n.FRR.DataPlane, defaultDataPlane))
		for _, p := range peers {
			fmt.Fprintf(&paths, "  - {name: %s%s, interface: %s, bfd: {peer: %q, frr: true}}\n", feature.Scalar(p.Interface), netns, feature.Scalar(p.Interface), p.Addr)
			why = append(why, fmt.Sprintf("FRR's bfdd has the BFD neighbour %s on %s.", p.Addr, p.Interface))
		}
		if n.FRR.DataPlane == "" {
			why = append(why, fmt.Sprintf("Start bfdd with --dplaneaddr %s (/etc/frr/daemons): the kernel then runs its sessions.", defaultDataPlane))
		}
	}
	if paths.Len() == 0 {
		return nil
	}
	return []feature.Suggestion{{Text: "reroute:\n" + paths.String(), Reason: append(why,
		"Give a path segments: [ADDRESS, …], an SRv6 way around its link, and shadow: true for the first weeks.",
		"weir reroute plan computes the ways of a whole network.")}}
}

// judges returns a neighbour for each link, of IPv6 if there is one. Names of interfaces serve as names of paths.
func judges(n inventory.Namespace) (out []inventory.Peer) {
	for _, six := range []bool{true, false} {
		for _, p := range n.FRR.Peers {
			p.Interface = cmp.Or(p.Interface, connected(n.Interfaces, p.Addr))
			if p.Addr.Is6() == six && kernel.ValidName(p.Interface) && p.Interface != "frr" &&
				!slices.ContainsFunc(out, func(o inventory.Peer) bool { return o.Interface == p.Interface }) {
				out = append(out, p)
			}
		}
	}
	slices.SortFunc(out, func(a, b inventory.Peer) int { return cmp.Compare(a.Interface, b.Interface) })
	return out
}

// connected returns the interface with a network of the address, or "".
func connected(all []inventory.Interface, a netip.Addr) string {
	for _, i := range all {
		if !i.Loopback && slices.ContainsFunc(i.Addrs, func(p netip.Prefix) bool { return p.Bits() < a.BitLen() && p.Contains(a) }) {
			return i.Name
		}
	}
	return ""
}
