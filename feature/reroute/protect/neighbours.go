// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// neighbourKey is a neighbour that protection keeps, and the value its link address: the key and value of map_neighbours.
type neighbourKey struct {
	Ifindex uint32
	IPv6    uint32
	Addr    [16]byte
}

type neighbourValue struct {
	MAC [6]byte
	Pad uint16
}

func newNeighbourKey(index int, a netip.Addr) neighbourKey {
	k := neighbourKey{Ifindex: uint32(index), Addr: a.As16()}
	if a.Is6() {
		k.IPv6 = 1
	}
	return k
}

func (k neighbourKey) addr() netip.Addr {
	a := netip.AddrFrom16(k.Addr)
	if k.IPv6 == 0 {
		return a.Unmap()
	}
	return a
}

// resolveTime is how long a neighbour has to answer for its address. Apply does not wait for those that do not: weir serve asks
// again.
const resolveTime = 300 * time.Millisecond

// reconcileNeighbours keeps the neighbours of protected links and of backups: the kernel forgets those of a link without a carrier,
// and packets to them would never come as far as the egress program. Those that it knows become permanent; that they were not is
// noted before, and undone when nobody needs them any more. What the operator has made permanent stays as it is.
func (s *instance) reconcileNeighbours(routes []route) error {
	noted := s.pins.Maps[pinNeighbours]
	want, err := neighbours(routes)
	if err != nil {
		return err
	}
	var key neighbourKey
	var value neighbourValue
	var gone []neighbourKey
	it := noted.Iterate()
	for it.Next(&key, &value) {
		if !want[key] {
			gone = append(gone, key)
		}
	}
	if err := it.Err(); err != nil {
		return fmt.Errorf("reading the neighbours that are kept: %w", err)
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

// anyUnkept says whether a neighbour that is to be kept is not: it did not answer when it was asked.
func anyUnkept(routes []route) (bool, error) {
	want, err := neighbours(routes)
	if err != nil {
		return false, err
	}
	for k := range want {
		n, err := find(k)
		if err != nil {
			return false, err
		}
		if n == nil || n.State&(netlink.NUD_PERMANENT|netlink.NUD_NOARP) == 0 {
			return true, nil
		}
	}
	return false, nil
}

// address fills in the link addresses of the way to a neighbour that is known, so that the fast program need not look for them.
func (w *way) address() error {
	n, err := find(newNeighbourKey(int(w.Ifindex), w.via))
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

// neighbours are those that are to be kept: of every backup, and whatever gateway routes over protected links have.
func neighbours(routes []route) (map[neighbourKey]bool, error) {
	want, protected := map[neighbourKey]bool{}, map[int]bool{}
	for _, r := range routes {
		protected[r.ifindex] = true
		for _, w := range r.ways {
			want[newNeighbourKey(int(w.Ifindex), w.via)] = true
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
			want[newNeighbourKey(index, a)] = true
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

// find is the kernel's entry of a neighbour; nil: it has none.
func find(k neighbourKey) (*netlink.Neigh, error) {
	family := netlink.FAMILY_V4
	if k.IPv6 != 0 {
		family = netlink.FAMILY_V6
	}
	all, err := netlink.NeighList(int(k.Ifindex), family)
	if err != nil {
		return nil, fmt.Errorf("listing neighbours: %w", err)
	}
	for _, n := range all {
		if a, ok := netip.AddrFromSlice(n.IP); ok && a == k.addr() {
			return &n, nil
		}
	}
	return nil, nil
}

const known = netlink.NUD_REACHABLE | netlink.NUD_STALE | netlink.NUD_DELAY | netlink.NUD_PROBE | netlink.NUD_PERMANENT

// keep makes a neighbour permanent, if it answers. Neighbours of devices that need none are not entries: nothing is kept.
func keep(noted *ebpf.Map, k neighbourKey) error {
	var v neighbourValue
	err := noted.Lookup(k, &v)
	ours := err == nil
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("reading the neighbours that are kept: %w", err)
	}
	n, err := find(k)
	if err != nil {
		return err
	}
	if n != nil && n.State&netlink.NUD_PERMANENT != 0 {
		return nil // ours since before, or the operator's
	}
	if n == nil || n.State&known == 0 || len(n.HardwareAddr) != 6 {
		if n, err = ask(k); err != nil {
			return err
		}
	}
	switch {
	case n != nil:
		copy(v.MAC[:], n.HardwareAddr)
	case !ours:
		return nil // it does not answer: asked again with the next look
	}
	if err := noted.Put(k, v); err != nil {
		return fmt.Errorf("noting the neighbour %s: %w", k.addr(), err)
	}
	return setNeighbour(k, v, netlink.NUD_PERMANENT)
}

func setNeighbour(k neighbourKey, v neighbourValue, state int) error {
	family := netlink.FAMILY_V4
	if k.IPv6 != 0 {
		family = netlink.FAMILY_V6
	}
	err := netlink.NeighSet(&netlink.Neigh{LinkIndex: int(k.Ifindex), Family: family, State: state, IP: k.addr().AsSlice(), HardwareAddr: v.MAC[:]})
	if err != nil && !errors.Is(err, unix.ENODEV) && !errors.Is(err, unix.ENETDOWN) && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("keeping the neighbour %s: %w", k.addr(), err)
	}
	return nil // an interface that is down or gone has no neighbours
}

// ask has the kernel find out a neighbour's link address; nil: it did not.
func ask(k neighbourKey) (*netlink.Neigh, error) {
	for end := time.Now().Add(resolveTime); ; time.Sleep(5 * time.Millisecond) {
		n, err := find(k)
		if err != nil || n != nil && n.State&known != 0 && len(n.HardwareAddr) == 6 {
			return n, err
		}
		if time.Now().After(end) || (n != nil && n.State&netlink.NUD_NOARP != 0) {
			return nil, nil
		}
		if n == nil || n.State&netlink.NUD_INCOMPLETE == 0 {
			// NTF_USE: resolve it now (linux/neighbour.h).
			use := &netlink.Neigh{LinkIndex: int(k.Ifindex), IP: k.addr().AsSlice(), State: netlink.NUD_NONE, Flags: netlink.NTF_USE}
			if err := netlink.NeighSet(use); err != nil {
				return nil, nil //nolint:nilerr // the interface is down: it is asked again
			}
		}
	}
}

// release gives a neighbour back to the kernel, which asks it before it believes in it for long.
func release(noted *ebpf.Map, k neighbourKey) error {
	var v neighbourValue
	if err := noted.Lookup(k, &v); err != nil {
		return fmt.Errorf("reading the neighbours that are kept: %w", err)
	}
	n, err := find(k)
	if err != nil {
		return err
	}
	if n != nil && n.State&netlink.NUD_PERMANENT != 0 {
		if len(n.HardwareAddr) == len(v.MAC) {
			copy(v.MAC[:], n.HardwareAddr) // it may have got another one since
		}
		if err := setNeighbour(k, v, netlink.NUD_STALE); err != nil {
			return err
		}
	}
	if err := noted.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("forgetting the neighbour %s: %w", k.addr(), err)
	}
	return nil
}
