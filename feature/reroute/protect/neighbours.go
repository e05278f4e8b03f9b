// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/reroute/protect/neigh"
)

// reconcileNeighbours keeps the neighbours of protected links and of backups. The kernel forgets neighbours of a link
// without a carrier, and their packets would never reach the egress program. Known neighbours become permanent. Each
// is recorded first and restored once unneeded. Permanent entries of the operator are left alone.
func (s *instance) reconcileNeighbours(routes []route) error {
	noted := s.pins.Maps[pinNeighbours]
	want, err := neighbours(routes)
	if err != nil {
		return err
	}
	var key neigh.Key
	var value neigh.Value
	var gone []neigh.Key
	it := noted.Iterate()
	for it.Next(&key, &value) {
		if !want[key] {
			gone = append(gone, key)
		}
	}
	if err := it.Err(); err != nil {
		return fmt.Errorf("reading the kept neighbours: %w", err)
	}
	if err := s.dropStandIns(want); err != nil {
		return err
	}
	for _, k := range gone {
		if err := release(noted, k); err != nil {
			return err
		}
	}
	for k := range want {
		if err := keep(noted, k); err != nil {
			return err
		}
	}
	for _, r := range routes {
		for i := range r.ways {
			if err := r.ways[i].address(); err != nil {
				return err
			}
		}
	}
	return nil
}

// anyUnkept reports whether a needed neighbour has no permanent entry because it did not answer.
func anyUnkept(routes []route) (bool, error) {
	want, err := neighbours(routes)
	if err != nil {
		return false, err
	}
	for k := range want {
		n, err := neigh.Find(k)
		if err != nil {
			return false, err
		}
		if n == nil || n.State&(netlink.NUD_PERMANENT|netlink.NUD_NOARP) == 0 {
			return true, nil
		}
	}
	return false, nil
}

// address fills in the link addresses of a way with a known neighbour. The fast program then needs no lookup.
func (w *way) address() error {
	n, err := neigh.Find(neigh.NewKey(int(w.Ifindex), w.via))
	if err != nil || n == nil || n.State&netlink.NUD_PERMANENT == 0 || len(n.HardwareAddr) != 6 || len(w.mac) != 6 {
		return err
	}
	b := append(slices.Clone(n.HardwareAddr), w.mac...)
	for i := range w.Macs {
		w.Macs[i] = binary.NativeEndian.Uint32(b[4*i:])
	}
	w.Flags |= flagMACs
	return nil
}

// neighbours returns the neighbours to keep: of every backup, and all gateways of routes over protected links.
func neighbours(routes []route) (map[neigh.Key]bool, error) {
	want, protected := map[neigh.Key]bool{}, map[int]bool{}
	for _, r := range routes {
		protected[r.ifindex] = true
		for _, w := range r.ways {
			want[neigh.NewKey(int(w.Ifindex), w.via)] = true
		}
	}
	if len(protected) == 0 {
		return want, nil
	}
	add := func(index int, gw net.IP, via netlink.Destination) {
		if v, ok := via.(*netlink.Via); ok && gw == nil {
			gw = v.Addr
		}
		if a, ok := netip.AddrFromSlice(gw); ok && protected[index] {
			want[neigh.NewKey(index, a)] = true
		}
	}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		err := netlink.RouteListFilteredIter(family, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE, func(r netlink.Route) bool {
			add(r.LinkIndex, r.Gw, r.Via)
			for _, m := range r.MultiPath {
				add(m.LinkIndex, m.Gw, m.Via)
			}
			return true
		})
		if err != nil {
			return nil, fmt.Errorf("listing routes: %w", err)
		}
	}
	return want, nil
}

// keep makes an answering neighbour permanent. Devices without link addresses have no entries, so nothing is kept.
func keep(noted *ebpf.Map, k neigh.Key) error {
	var v neigh.Value
	err := noted.Lookup(k, &v)
	ours := err == nil
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("reading the kept neighbours: %w", err)
	}
	n, err := neigh.Find(k)
	if err != nil {
		return err
	}
	if n != nil && n.State&netlink.NUD_PERMANENT != 0 {
		return nil // kept before, or the operator's
	}
	if isStandIn(n) {
		n = nil // Run resolves it
	} else if n == nil || n.State&neigh.Known == 0 || len(n.HardwareAddr) != 6 {
		if n, err = neigh.Resolve(k); err != nil {
			return err
		}
	}
	switch {
	case n != nil:
		copy(v.MAC[:], n.HardwareAddr)
	case !ours:
		return nil // no answer: reconcile asks again
	}
	if err := noted.Put(k, v); err != nil {
		return fmt.Errorf("recording the neighbour %s: %w", k.Addr(), err)
	}
	return neigh.Set(k, v, netlink.NUD_PERMANENT)
}

// release returns a neighbour to the kernel as stale, so the kernel verifies it before longer use.
func release(noted *ebpf.Map, k neigh.Key) error {
	var v neigh.Value
	if err := noted.Lookup(k, &v); err != nil {
		return fmt.Errorf("reading the kept neighbours: %w", err)
	}
	n, err := neigh.Find(k)
	if err != nil {
		return err
	}
	if n != nil && n.State&netlink.NUD_PERMANENT != 0 {
		if len(n.HardwareAddr) == len(v.MAC) {
			copy(v.MAC[:], n.HardwareAddr) // the address may have changed
		}
		if err := neigh.Set(k, v, netlink.NUD_STALE); err != nil {
			return err
		}
	}
	if err := noted.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("deleting the record of neighbour %s: %w", k.Addr(), err)
	}
	return nil
}
