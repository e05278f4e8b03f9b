// SPDX-License-Identifier: Apache-2.0

// Package neigh reads, writes and queries the neighbours of a network namespace, for package protect.
package neigh

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/dump"
)

// Key is a neighbour of an interface. Keys and values have the layout of the pinned map of neighbours.
type Key struct {
	Ifindex uint32
	IPv6    uint32
	Bytes   [16]byte // its address; IPv4 in IPv4-mapped form
}

// Value is the link address of a neighbour.
type Value struct {
	MAC [6]byte
	Pad uint16
}

// NewKey returns the key of an address on an interface.
func NewKey(index int, a netip.Addr) Key {
	k := Key{Ifindex: uint32(index), Bytes: a.As16()}
	if a.Is6() {
		k.IPv6 = 1
	}
	return k
}

// Addr returns the address of the neighbour.
func (k Key) Addr() netip.Addr {
	a := netip.AddrFrom16(k.Bytes)
	if k.IPv6 == 0 {
		return a.Unmap()
	}
	return a
}

// ResolveTime is a neighbour's time to answer. Apply does not wait longer, because weir serve asks again.
const ResolveTime = 300 * time.Millisecond

// Find returns the kernel's entry of a neighbour, or nil.
func Find(k Key) (*netlink.Neigh, error) {
	family := netlink.FAMILY_V4
	if k.IPv6 != 0 {
		family = netlink.FAMILY_V6
	}
	all, err := dump.NeighList(int(k.Ifindex), family)
	if err != nil {
		return nil, fmt.Errorf("listing neighbours: %w", err)
	}
	for _, n := range all {
		if a, ok := netip.AddrFromSlice(n.IP); ok && a == k.Addr() {
			return &n, nil
		}
	}
	return nil, nil
}

// Known are the states with a link address from the neighbour or the operator.
const Known = netlink.NUD_REACHABLE | netlink.NUD_STALE | netlink.NUD_DELAY | netlink.NUD_PROBE | netlink.NUD_PERMANENT

// Set writes an entry to the kernel. It ignores interfaces down or gone, because these have no entries.
func Set(k Key, v Value, state int) error {
	family := netlink.FAMILY_V4
	if k.IPv6 != 0 {
		family = netlink.FAMILY_V6
	}
	err := netlink.NeighSet(&netlink.Neigh{LinkIndex: int(k.Ifindex), Family: family, State: state, IP: k.Addr().AsSlice(), HardwareAddr: v.MAC[:]})
	if err != nil && !errors.Is(err, unix.ENODEV) && !errors.Is(err, unix.ENETDOWN) && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("keeping the neighbour %s: %w", k.Addr(), err)
	}
	return nil // an interface down or gone has no neighbours
}

// Resolve makes the kernel resolve a neighbour's link address. It returns nil without an answer.
func Resolve(k Key) (*netlink.Neigh, error) {
	for end := time.Now().Add(ResolveTime); ; time.Sleep(5 * time.Millisecond) {
		n, err := Find(k)
		if err != nil || n != nil && n.State&Known != 0 && len(n.HardwareAddr) == 6 {
			return n, err
		}
		if time.Now().After(end) || (n != nil && n.State&netlink.NUD_NOARP != 0) {
			return nil, nil
		}
		if n == nil || n.State&netlink.NUD_INCOMPLETE == 0 {
			// NTF_USE: resolve it now (linux/neighbour.h).
			use := &netlink.Neigh{LinkIndex: int(k.Ifindex), IP: k.Addr().AsSlice(), State: netlink.NUD_NONE, Flags: netlink.NTF_USE}
			if err := netlink.NeighSet(use); err != nil {
				return nil, nil //nolint:nilerr // the interface is down: it is asked again
			}
		}
	}
}

// standIn is the link address of neighbours without one, on unusable links. No host has it, so weir recognizes its
// entries by it.
var standIn = [6]byte{0x02, 0x77, 0x65, 0x69, 0x72, 0x02}

// StandIn returns the link address of [PutStandIn]'s entries.
func StandIn() net.HardwareAddr { return standIn[:] }

// IsStandIn reports whether a link address is [StandIn].
func IsStandIn(mac net.HardwareAddr) bool { return bytes.Equal(mac, standIn[:]) }

// PutStandIn gives a neighbour an unused link address. The entry is not permanent: without renewal the kernel
// resolves the neighbour itself within a minute.
func PutStandIn(k Key) error { return Set(k, Value{MAC: standIn}, netlink.NUD_REACHABLE) }

// DropStandIns removes the stand-ins of all neighbours except those selected by stays. The kernel resolves the
// removed ones with the next packet.
func DropStandIns(stays func(Key) bool) error {
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		all, err := dump.NeighList(0, family)
		if err != nil {
			return fmt.Errorf("listing neighbours: %w", err)
		}
		for _, n := range all {
			a, ok := netip.AddrFromSlice(n.IP)
			if !ok || !IsStandIn(n.HardwareAddr) || stays(NewKey(n.LinkIndex, a)) {
				continue
			}
			err := netlink.NeighDel(&netlink.Neigh{LinkIndex: n.LinkIndex, Family: family, IP: n.IP})
			if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENODEV) && !errors.Is(err, unix.ENETDOWN) {
				return fmt.Errorf("removing the stand-in of the neighbour %s: %w", a, err)
			}
		}
	}
	return nil
}
