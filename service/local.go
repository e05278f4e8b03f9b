// SPDX-License-Identifier: Apache-2.0

package service

import (
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/dump"
)

// NotLocal returns the addresses and prefixes of endpoints without local delivery in the calling thread's namespace:
// without a local route into them no socket gets their packets. A route that depends on a mark counts only in the table
// local.
func NotLocal(eps []Endpoint) (out []netip.Prefix, err error) {
	told := map[netip.Prefix]bool{}
	tables := map[uint8][]netip.Prefix{}
	for _, e := range eps {
		if e.Prefix.Bits() <= 0 || told[e.Prefix] || delivered(e.Prefix.Addr()) || delivered(e.Prefix.Addr().Next()) && !e.Prefix.IsSingleIP() {
			continue
		}
		told[e.Prefix] = true
		table, read := tables[e.Family]
		if !read {
			if table, err = LocalRoutes(int(e.Family), 0); err != nil {
				return nil, err
			}
			tables[e.Family] = table
		}
		here := false
		for _, p := range table {
			here = here || p.Overlaps(e.Prefix)
		}
		if !here {
			out = append(out, e.Prefix)
		}
	}
	return out, nil
}

// delivered reports whether the routes deliver packets for an address to sockets.
func delivered(a netip.Addr) bool {
	if a.IsMulticast() {
		return true
	}
	routes, err := netlink.RouteGet(a.AsSlice())
	if err != nil || len(routes) == 0 {
		return false
	}
	t := routes[0].Type
	return t == unix.RTN_LOCAL || t == unix.RTN_ANYCAST || t == unix.RTN_BROADCAST
}

// LocalRoutes returns the prefixes of the table local in the calling thread's namespace. family may be
// netlink.FAMILY_ALL. kind is the type of the routes, such as RTN_LOCAL, or 0 for all.
func LocalRoutes(family, kind int) (out []netip.Prefix, err error) {
	mask := netlink.RT_FILTER_TABLE
	if kind != 0 {
		mask |= netlink.RT_FILTER_TYPE
	}
	routes, err := dump.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_LOCAL, Type: kind}, mask)
	if err != nil {
		return nil, fmt.Errorf("read the routes to local addresses: %w", err)
	}
	for _, r := range routes {
		if r.Dst == nil {
			continue
		}
		if a, ok := netip.AddrFromSlice(r.Dst.IP); ok {
			bits, _ := r.Dst.Mask.Size()
			if p, err := a.Unmap().Prefix(bits); err == nil {
				out = append(out, p)
			}
		}
	}
	return out, nil
}
