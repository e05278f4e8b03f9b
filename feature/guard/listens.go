// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/guard/bpf"
	"github.com/weir-project/weir/internal/guardstate"
)

// destination selects the guarded datagrams to one port of a prefix.
type destination struct {
	prefix netip.Prefix
	port   uint16
	guard  uint16
	at     uint16 // hook of the decision
}

// Hooks of a destination's guard: enum guard_at.
const (
	atSockets    = 0
	atInterfaces = 1
)

// maxPrefixes is GUARD_PREFIXES: the maximum for one port and family over all guards of a
// namespace.
const maxPrefixes = 8

// listenLayout is the prefixes of a port, in the layout of guard.h.
type listenLayout bpf.GuardGuardListen

// listens returns the lookup entries for destinations. Port 0 is for later fragments without ports:
// they are charged to the guard with the longest matching prefix.
func listens(all []destination) (map[bpf.GuardGuardListenKey]listenLayout, error) {
	sorted := slices.Clone(all)
	slices.SortStableFunc(sorted, func(a, b destination) int { return b.prefix.Bits() - a.prefix.Bits() })
	out := map[bpf.GuardGuardListenKey]listenLayout{}
	for _, d := range sorted {
		family := uint8(4)
		if d.prefix.Addr().Is6() {
			family = 6
		}
		for _, port := range []uint16{d.port, 0} {
			k := bpf.GuardGuardListenKey{Port: guardstate.NetworkOrder(port), Family: family}
			l := out[k]
			if !l.add(d) && port != 0 {
				return nil, fmt.Errorf("port %d of IPv%d has more than %d guarded prefixes: guard a common prefix instead", d.port, family, maxPrefixes)
			}
			out[k] = l
		}
	}
	return out, nil
}

// add appends a destination unless its prefix exists. It returns false if there is no room.
func (l *listenLayout) add(d destination) bool {
	bits := d.prefix.Bits()
	if d.prefix.Addr().Is4() {
		bits += 96
	}
	address := d.prefix.Masked().Addr().As16()
	for i := range l.Count {
		if l.Prefix[i].Address == address && l.Prefix[i].Bits == uint32(bits) {
			return true
		}
	}
	if l.Count == maxPrefixes {
		return false
	}
	p := &l.Prefix[l.Count]
	p.Address, p.Bits, p.Guard, p.At = address, uint32(bits), d.guard, d.at
	l.Count++
	return true
}

// foreign returns the map's destinations of guards outside known.
func foreign(m *ebpf.Map, known map[uint16]bool) (out []destination, err error) {
	var k bpf.GuardGuardListenKey
	var v listenLayout
	it := m.Iterate()
	for it.Next(&k, &v) {
		if k.Port == 0 {
			continue // derived from the others
		}
		for _, p := range v.Prefix[:min(v.Count, maxPrefixes)] {
			if known[p.Guard] {
				continue
			}
			addr, bits := netip.AddrFrom16(p.Address), int(p.Bits)
			if k.Family == 4 {
				addr, bits = addr.Unmap(), bits-96
			}
			out = append(out, destination{netip.PrefixFrom(addr, bits), guardstate.NetworkOrder(k.Port), p.Guard, p.At})
		}
	}
	if err := it.Err(); err != nil {
		return nil, fmt.Errorf("read the guarded destinations: %w", err)
	}
	return out, nil
}

// reconcileListens makes the map equal want. It replaces changed entries one by one: a packet finds
// either the old or the new entry.
func reconcileListens(m *ebpf.Map, want map[bpf.GuardGuardListenKey]listenLayout) error {
	for k, v := range want {
		if err := m.Put(k, v); err != nil {
			return fmt.Errorf("guard port %d: %w", guardstate.NetworkOrder(k.Port), err)
		}
	}
	var have []bpf.GuardGuardListenKey
	var k bpf.GuardGuardListenKey
	var v listenLayout
	it := m.Iterate()
	for it.Next(&k, &v) {
		have = append(have, k)
	}
	if err := it.Err(); err != nil {
		return fmt.Errorf("read the guarded destinations: %w", err)
	}
	for _, k := range have {
		if _, ok := want[k]; ok {
			continue
		}
		if err := m.Delete(k); err != nil {
			return fmt.Errorf("stop guarding port %d: %w", guardstate.NetworkOrder(k.Port), err)
		}
	}
	return nil
}
