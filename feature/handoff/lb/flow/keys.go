// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/weir-project/weir/feature/handoff/lb/spec"
)

// Keys returns a client's flows to a service, one for each address of the service in the client's
// family.
func Keys(services []spec.Service, service, client string) (keys []Key, err error) {
	known := false
	for _, s := range services {
		if s.Name != service {
			continue
		}
		known = true
		at, err := netip.ParseAddrPort(client)
		if s.BySource {
			var addr netip.Addr
			addr, err = netip.ParseAddr(client)
			at = netip.AddrPortFrom(addr, 0)
		}
		if err != nil {
			return nil, fmt.Errorf("client %q: want an address for a service by source, else an address and port", client)
		}
		k := Key{Client: netip.AddrPortFrom(at.Addr().Unmap(), at.Port()), Service: s.Flows()}
		if (s.BySource || spec.SameFamily(s.Listen.Addr(), k.Client.Addr())) && !slices.Contains(keys, k) {
			keys = append(keys, k)
		}
	}
	if !known {
		return nil, fmt.Errorf("service %q: this load balancer has no service of this name", service)
	}
	if len(keys) == 0 {
		return nil, fmt.Errorf("client %q: service %q has no address of this family", client, service)
	}
	return keys, nil
}
