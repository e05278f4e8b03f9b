// SPDX-License-Identifier: Apache-2.0

package reroute

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/weir-project/weir/feature/reroute/protect"
	"github.com/weir-project/weir/internal/netns"
)

// isOfHost returns an error if planned paths, all of one namespace, cannot be this host's. A plan of another router
// would remove this router's repairs. Interface names prove little, because every host has an eth0; neighbours'
// addresses prove more.
func isOfHost(planned []protect.Path) error {
	ns, err := netns.Open(planned[0].Netns)
	if err != nil {
		return err
	}
	defer ns.Close()
	return ns.Do(func() error {
		for _, p := range planned {
			if _, err := net.InterfaceByName(p.Device); err != nil {
				return otherRouter("there is no interface %s here", p.Device)
			}
			for _, r := range p.Repairs {
				if err := isNeighbour(r.Device, r.Via); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// isNeighbour returns an error if an address cannot be a neighbour's on an interface, judging by the interface's
// addresses. Invalid and link-local addresses are accepted.
func isNeighbour(device string, via netip.Addr) error {
	i, err := net.InterfaceByName(device)
	if err != nil {
		return otherRouter("there is no interface %s here", device)
	}
	if !via.IsValid() || via.IsLinkLocalUnicast() {
		return nil
	}
	if all, err := net.InterfaceAddrs(); err == nil {
		for _, a := range all {
			if n, err := netip.ParsePrefix(a.String()); err == nil && n.Addr() == via {
				return otherRouter("%s, a neighbour in the plan, is this host's own address", via)
			}
		}
	}
	numbered, addrs := false, []net.Addr(nil)
	if addrs, err = i.Addrs(); err != nil {
		return nil // unknown
	}
	for _, a := range addrs {
		n, err := netip.ParsePrefix(a.String())
		if err != nil || n.Addr().IsLinkLocalUnicast() || n.Addr().Is4() != via.Is4() || n.IsSingleIP() {
			continue
		}
		if numbered = true; n.Contains(via) {
			return nil
		}
	}
	if numbered {
		return otherRouter("%s, a neighbour in the plan, is in no network of interface %s", via, device)
	}
	return nil
}

func otherRouter(format string, a ...any) error {
	return fmt.Errorf("%w: %s: name this host with --node", errOtherRouter, fmt.Sprintf(format, a...))
}
