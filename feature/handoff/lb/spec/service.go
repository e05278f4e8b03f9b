// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"cmp"
	"hash/fnv"
	"maps"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/peer"
)

// Service is a service at one address. Every backend has the address.
type Service struct {
	Name     string // for people, and for registering backends
	ID       int    // below 64
	Tag      int    // distinguishes the flows of this address from other addresses of the service: see Tagged
	Listen   netip.AddrPort
	Proto    uint8 // unix.IPPROTO_TCP or IPPROTO_UDP
	BySource bool  // all flows of a client's address belong to one backend
}

// ServiceAddresses returns the services of the file, one for each address.
func (c *Config) ServiceAddresses() (out []Service) {
	for _, name := range slices.Sorted(maps.Keys(c.Services)) {
		s := c.Services[name]
		for _, l := range s.Listen {
			out = append(out, Service{Name: name, ID: s.Number, Listen: netip.AddrPortFrom(l.Prefix.Addr(), l.Port), Proto: l.Proto, BySource: s.By == "source"})
		}
	}
	return Tagged(out)
}

// Flows returns the number of the service's flows at this address: the service's number, and above
// it the tag.
func (s Service) Flows() int { return int(peer.FlowService(uint16(s.ID), uint16(s.Tag))) }

// ServiceNumber returns the service's number from a number of flows.
func ServiceNumber(flows int) int { return int(peer.ServiceNumber(uint16(flows))) }

// SameFamily reports whether both addresses are IPv4, or both IPv6.
func SameFamily(a, b netip.Addr) bool { return a.Unmap().Is4() == b.Unmap().Is4() }

// Tagged sets the tags of the addresses of TCP services by flow. A client may have connections from
// one port to several addresses, and each is a flow of its own. An address alone in its family has
// tag 0. Other tags depend on the addresses alone, so both load balancers of a pair find the same.
func Tagged(services []Service) []Service {
	type family struct {
		id int
		v4 bool
	}
	of := map[family][]*Service{}
	for i := range services {
		if s := &services[i]; !s.BySource && s.Proto == unix.IPPROTO_TCP {
			f := family{s.ID, s.Listen.Addr().Unmap().Is4()}
			of[f] = append(of[f], s)
		}
	}
	for _, all := range of {
		if len(all) == 1 {
			continue
		}
		slices.SortFunc(all, func(a, b *Service) int {
			return cmp.Or(a.Listen.Addr().Compare(b.Listen.Addr()), cmp.Compare(a.Listen.Port(), b.Listen.Port()))
		})
		taken := map[int]bool{}
		for _, s := range all {
			h := fnv.New32a()
			_, _ = h.Write([]byte(s.Listen.String())) // never fails
			for s.Tag = 1 + int(h.Sum32()%peer.MaxTag); taken[s.Tag]; s.Tag = 1 + s.Tag%peer.MaxTag {
			}
			taken[s.Tag] = true
		}
	}
	return services
}
