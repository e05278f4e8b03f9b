// SPDX-License-Identifier: Apache-2.0

// Package places reads and writes the locations of backends in a load balancer's data path.
package places

import (
	"errors"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/handoff/lb/bpf"
	"github.com/weir-project/weir/feature/handoff/lb/locate"
	"github.com/weir-project/weir/feature/handoff/move"
)

// Maps are the maps from locations to backends' numbers.
type Maps struct{ MACs, Tunnels *ebpf.Map }

// Placed returns the backends with a location.
func (m Maps) Placed() map[move.Backend]bool {
	out := m.Tunnelled()
	_ = m.eachMAC(func(_ locate.Key, number move.Backend) { out[number] = true })
	return out
}

// Tunnelled returns the backends at the end of a tunnel.
func (m Maps) Tunnelled() map[move.Backend]bool {
	out := map[move.Backend]bool{}
	_ = m.eachTunnel(func(_ locate.Key, number move.Backend) { out[number] = true })
	return out
}

// Locations returns the locations of each backend. It has one, and more while it changes.
func (m Maps) Locations() map[move.Backend][]locate.Key {
	out := map[move.Backend][]locate.Key{}
	add := func(k locate.Key, number move.Backend) { out[number] = append(out[number], k) }
	_, _ = m.eachMAC(add), m.eachTunnel(add)
	return out
}

// Owner returns the backend at a location, 0 for none.
func (m Maps) Owner(p locate.Key) uint16 {
	var number uint32
	if p.Tunnel.IsValid() {
		_ = m.Tunnels.Lookup(tunnelKey(p), &number) // without an entry it stays 0
	} else {
		_ = m.MACs.Lookup(macKey(p), &number)
	}
	return uint16(number)
}

// Put gives a location to a backend.
func (m Maps) Put(p locate.Key, number move.Backend) error {
	if p.Tunnel.IsValid() {
		return m.Tunnels.Put(tunnelKey(p), uint32(number))
	}
	return m.MACs.Put(macKey(p), uint32(number))
}

// Drop removes the locations of a backend.
func (m Maps) Drop(number move.Backend) error {
	keep := map[locate.Key]bool{}
	see := func(k locate.Key, of move.Backend) { keep[k] = of != number }
	if err := errors.Join(m.eachMAC(see), m.eachTunnel(see)); err != nil {
		return err
	}
	return m.Keep(keep)
}

// Keep removes all other locations.
func (m Maps) Keep(keep map[locate.Key]bool) error {
	var gone []locate.Key
	see := func(k locate.Key, _ move.Backend) {
		if !keep[k] {
			gone = append(gone, k)
		}
	}
	err := errors.Join(m.eachMAC(see), m.eachTunnel(see))
	for _, k := range gone {
		if k.Tunnel.IsValid() {
			err = errors.Join(err, m.Tunnels.Delete(tunnelKey(k)))
		} else {
			err = errors.Join(err, m.MACs.Delete(macKey(k)))
		}
	}
	return err
}

func (m Maps) eachMAC(see func(locate.Key, move.Backend)) error {
	var number uint32
	var k bpf.LBLbMacKey
	it := m.MACs.Iterate()
	for it.Next(&k, &number) {
		see(locate.Key{Interface: int(k.Ifindex), MAC: k.Mac}, move.Backend(number))
	}
	return it.Err()
}

func (m Maps) eachTunnel(see func(locate.Key, move.Backend)) error {
	var number uint32
	var k bpf.LBLbTunnelKey
	it := m.Tunnels.Iterate()
	for it.Next(&k, &number) {
		see(locate.Key{Tunnel: netip.AddrFrom16(k.Addr).Unmap()}, move.Backend(number))
	}
	return it.Err()
}

func macKey(p locate.Key) bpf.LBLbMacKey {
	return bpf.LBLbMacKey{Ifindex: uint32(p.Interface), Mac: p.MAC}
}

func tunnelKey(p locate.Key) bpf.LBLbTunnelKey {
	return bpf.LBLbTunnelKey{Addr: p.Tunnel.As16()}
}
