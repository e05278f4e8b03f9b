// SPDX-License-Identifier: Apache-2.0

// Package dump lists the kernel's network objects like package netlink, and again after a change during the listing.
//
// The kernel marks such a listing with NLM_F_DUMP_INTR (netlink(7)): objects may be missing or listed twice. Package
// netlink then returns [netlink.ErrDumpInterrupted]. On a host with containers or a routing daemon this is common.
package dump

import (
	"errors"

	"github.com/vishvananda/netlink"
)

// tries bounds the listings of a host that changes all the time. A listing takes less than 1 ms for a thousand objects.
const tries = 50

func whole[T any](list func() ([]T, error)) (all []T, err error) {
	for range tries {
		if all, err = list(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return all, err
}

// LinkList is [netlink.LinkList].
func LinkList() ([]netlink.Link, error) { return whole(netlink.LinkList) }

// AddrList is [netlink.AddrList].
func AddrList(l netlink.Link, family int) ([]netlink.Addr, error) {
	return whole(func() ([]netlink.Addr, error) { return netlink.AddrList(l, family) })
}

// NeighList is [netlink.NeighList].
func NeighList(ifindex, family int) ([]netlink.Neigh, error) {
	return whole(func() ([]netlink.Neigh, error) { return netlink.NeighList(ifindex, family) })
}

// RouteList is [netlink.RouteList].
func RouteList(l netlink.Link, family int) ([]netlink.Route, error) {
	return whole(func() ([]netlink.Route, error) { return netlink.RouteList(l, family) })
}

// RouteListFiltered is [netlink.RouteListFiltered].
func RouteListFiltered(family int, filter *netlink.Route, mask uint64) ([]netlink.Route, error) {
	return whole(func() ([]netlink.Route, error) { return netlink.RouteListFiltered(family, filter, mask) })
}

// RuleList is [netlink.RuleList].
func RuleList(family int) ([]netlink.Rule, error) {
	return whole(func() ([]netlink.Rule, error) { return netlink.RuleList(family) })
}

// FilterList is [netlink.FilterList].
func FilterList(l netlink.Link, parent uint32) ([]netlink.Filter, error) {
	return whole(func() ([]netlink.Filter, error) { return netlink.FilterList(l, parent) })
}

// QdiscList is [netlink.QdiscList].
func QdiscList(l netlink.Link) ([]netlink.Qdisc, error) {
	return whole(func() ([]netlink.Qdisc, error) { return netlink.QdiscList(l) })
}
