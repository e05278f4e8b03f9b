// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/table"
)

// noRepair is the table's value of destinations left to the kernel. It is no repair number.
const noRepair = table.MaxValue

// mirror computes the fast program's table from the kernel's routes. Destinations routed to a protected link get
// their repair. Longer prefixes routed elsewhere get noRepair.
func (f *fast) mirror() ([]table.Entry, error) {
	repairs, err := f.readRepairs()
	if err != nil {
		return nil, err
	}
	best := map[netip.Prefix]netlink.Route{}
	err = netlink.RouteListFilteredIter(netlink.FAMILY_V6, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE, func(r netlink.Route) bool {
		p, ok := destination(r)
		if !ok || r.Table != unix.RT_TABLE_MAIN && r.Table != unix.RT_TABLE_LOCAL {
			return true
		}
		o, taken := best[p]
		switch {
		case !taken || r.Table == unix.RT_TABLE_LOCAL || o.Table != unix.RT_TABLE_LOCAL && r.Priority < o.Priority:
			best[p] = r
		case r.Priority == o.Priority && o.Table == r.Table:
			o.MultiPath = append(o.MultiPath, nil, nil) // several of equal rank: the kernel chooses
			best[p] = o
		}
		return true
	})
	if err != nil {
		return nil, fmt.Errorf("listing routes: %w", err)
	}
	return entries(best, repairs), nil
}

// destination returns the prefix of a route.
func destination(r netlink.Route) (netip.Prefix, bool) {
	if r.Dst == nil {
		return netip.PrefixFrom(netip.IPv6Unspecified(), 0), true
	}
	a, ok := netip.AddrFromSlice(r.Dst.IP.To16())
	bits, _ := r.Dst.Mask.Size()
	return netip.PrefixFrom(a, bits).Masked(), ok
}

// entries computes the table's entries.
func entries(best map[netip.Prefix]netlink.Route, repairs map[int]repairOf) (out []table.Entry) {
	values := map[netip.Prefix]uint32{}
	for p, r := range best {
		if link, ours := repairs[r.LinkIndex]; ours && simple(r) {
			if id := link.of(p); id != 0 {
				values[p] = id
			}
		}
	}
	// Add repairs of prefixes longer than their route.
	for index, link := range repairs {
		for p, id := range link.prefixes {
			if _, exact := best[p]; exact {
				continue
			}
			if r, ok := covering(best, p); ok && r.LinkIndex == index && simple(r) {
				values[p] = id
			}
		}
	}
	for p := range best {
		if _, ours := values[p]; !ours && within(values, p) {
			values[p] = noRepair
		}
	}
	for p, v := range values {
		out = append(out, table.Entry{Prefix: p, Value: v})
	}
	return out
}

// simple reports whether a route consists of a link and a neighbour only.
func simple(r netlink.Route) bool {
	return r.Type == unix.RTN_UNICAST && r.Table == unix.RT_TABLE_MAIN && len(r.MultiPath) == 0 && r.Encap == nil && r.MTU == 0 && r.Flags&unix.RTNH_F_DEAD == 0
}

// covering returns the longest route covering a prefix.
func covering(best map[netip.Prefix]netlink.Route, p netip.Prefix) (netlink.Route, bool) {
	for bits := p.Bits(); bits >= 0; bits-- {
		if r, ok := best[netip.PrefixFrom(p.Addr(), bits).Masked()]; ok {
			return r, true
		}
	}
	return netlink.Route{}, false
}

// within reports whether a shorter prefix has a repair.
func within(values map[netip.Prefix]uint32, p netip.Prefix) bool {
	for bits := p.Bits() - 1; bits >= 0; bits-- {
		if v := values[netip.PrefixFrom(p.Addr(), bits).Masked()]; v != 0 && v != noRepair {
			return true
		}
	}
	return false
}
