// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/weir-project/weir/internal/dump"
	"golang.org/x/sys/unix"
)

// Routes of next-hop objects vanish with the carrier, before any packet can be rerouted. So each protected link has a
// routing table with copies of them. The copies use no next-hop object and stay. No rule leads there. When the link
// loses its carrier, [Run] adds one behind all others.
//
//   - A packet reaches the table only without any other route, not even a default route. The routing protocol's new
//     route wins from its first packet on.
//   - While the link works nothing leads to the table, so a withdrawn prefix is unreachable at once. After the loss
//     of the carrier it is rerouted for at most KeepTime.
//   - Routing daemons see nothing in the main table and redistribute nothing. A high-metric route there would be
//     announced by some daemons, and would hide shorter prefixes of others.
//   - A rule costs every packet a quarter of plain forwarding, for at most KeepTime.
//
// [reconcile] updates the copies from the daemon's routes. While the link is down the copies are frozen.

const (
	keepProtocol = 119        // of the copies and the rule: RTA_PROTOCOL, FRA_PROTOCOL; 5 to 255 are for user space
	keepTables   = 0x77000000 // plus the interface index: a table
	keepPriority = 0x77777777 // of the rule: behind all others
	maxKept      = 10000      // per interface; the copies use memory
	keepMetric   = 1          // of the copies
	keepMask     = 1<<24 - 1  // interface index within a table number
)

// KeepTime is the time for a routing protocol to install new routes.
const KeepTime = 30 * time.Second

var keepTime = KeepTime // tests change it

func keepTable(index int) uint32 { return keepTables | uint32(index)&keepMask }

// keeper is a path with a repair for an address family.
type keeper struct {
	prefixes   []netip.Prefix
	for4, for6 bool
}

// keepers returns the rerouted paths of each interface.
func keepers(routes []route) map[int][]keeper {
	out := map[int][]keeper{}
	for _, r := range routes {
		k := keeper{prefixes: r.path.Prefixes}
		for _, w := range r.ways {
			k.for4, k.for6 = k.for4 || w.Flags&flagFor4 != 0, k.for6 || w.Flags&flagFor6 != 0
		}
		if !r.path.Shadow {
			out[r.ifindex] = append(out[r.ifindex], k)
		}
	}
	return out
}

// covers reports whether the path reroutes all packets to a destination.
func (k keeper) covers(to netip.Prefix) bool {
	if len(k.prefixes) > 0 && !slices.ContainsFunc(k.prefixes, func(p netip.Prefix) bool { return p.Bits() <= to.Bits() && p.Contains(to.Addr()) }) {
		return false
	}
	if to.Addr().Is4() {
		return k.for4
	}
	return k.for6
}

// copies returns the routes to copy for an interface: of destinations lost with its carrier.
func copies(index int, all []lone, paths []keeper) (out []tableRoute) {
	for _, l := range all {
		if l.table != unix.RT_TABLE_MAIN || !l.carrier || !l.via.IsValid() || !slices.ContainsFunc(paths, func(k keeper) bool { return k.covers(l.to) }) {
			continue
		}
		if len(out) == maxKept {
			break
		}
		out = append(out, tableRoute{tablePrefix: tablePrefix{keepTable(index), l.to}, oif: index, via: l.via, proto: keepProtocol, priority: keepMetric})
	}
	return out
}

// netlinkRoute converts the route for netlink.
func (r tableRoute) netlinkRoute() *netlink.Route {
	n := &netlink.Route{Table: int(r.table), LinkIndex: r.oif, Priority: int(r.priority), Protocol: netlink.RouteProtocol(r.proto), Flags: int(netlink.FLAG_ONLINK),
		Dst: ipNet(r.to)}
	if r.via.Is6() && r.to.Addr().Is4() {
		n.Via = &netlink.Via{AddrFamily: unix.AF_INET6, Addr: r.via.AsSlice()}
	} else {
		n.Gw = r.via.AsSlice()
	}
	return n
}

// reconcileKept updates the copies from the current routes. It runs in the namespace.
func reconcileKept(routes []route) error {
	rules, err := keepRules()
	if err != nil {
		return err
	}
	s, err := readRoutes()
	if err != nil {
		return err
	}
	up, err := withCarriers() // read after the routes: while a link is up, its routes were lost for another reason
	if err != nil {
		return err
	}
	paths := keepers(routes)
	var indexes []int
	frozen := map[uint32]bool{}
	for index := range paths {
		indexes = append(indexes, index)
		frozen[keepTable(index)] = !up[index] || len(rules[keepTable(index)]) > 0
	}
	want := map[tableRoute]bool{}
	for index, all := range s.alone(indexes...) {
		if frozen[keepTable(index)] {
			continue
		}
		for _, r := range copies(index, all, paths[index]) {
			want[r] = true
		}
	}
	for table, all := range rules {
		if _, protected := frozen[table]; !protected {
			if err := deleteRules(all); err != nil {
				return err
			}
		}
	}
	for r := range s.kept {
		if want[r] || frozen[r.table] {
			continue
		}
		if err := netlink.RouteDel(r.netlinkRoute()); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("removing the copy of the route to %s: %w", r.to, err)
		}
	}
	for r := range want {
		if s.kept[r] {
			continue
		}
		err := netlink.RouteAdd(r.netlinkRoute())
		if err != nil && !errors.Is(err, unix.EEXIST) && !errors.Is(err, unix.ENETDOWN) && !errors.Is(err, unix.ENETUNREACH) && !errors.Is(err, unix.ENODEV) && !errors.Is(err, unix.EHOSTUNREACH) {
			return fmt.Errorf("copying the route to %s: %w", r.to, err)
		}
	}
	return nil
}

// withCarriers returns the interfaces that are up with a carrier.
func withCarriers() (map[int]bool, error) {
	all, err := interfaces()
	if err != nil {
		return nil, fmt.Errorf("listing interfaces: %w", err)
	}
	out := map[int]bool{}
	for _, l := range all {
		out[l.Attrs().Index] = carries(l)
	}
	return out, nil
}

func carries(l netlink.Link) bool {
	const both = unix.IFF_UP | unix.IFF_LOWER_UP
	return l.Attrs().RawFlags&both == both
}

// keepRules returns weir's rules by table.
func keepRules() (map[uint32][]netlink.Rule, error) {
	out := map[uint32][]netlink.Rule{}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		all, err := dump.RuleList(family)
		if err != nil {
			return nil, fmt.Errorf("listing rules: %w", err)
		}
		for _, r := range all {
			if kept(r) {
				r.Family = family
				out[uint32(r.Table)] = append(out[uint32(r.Table)], r)
			}
		}
	}
	return out, nil
}

func kept(r netlink.Rule) bool { return r.Protocol == keepProtocol && r.Priority == keepPriority }

// addRules routes packets without another route by an interface's table.
func addRules(index int) error {
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		r := netlink.NewRule()
		r.Family, r.Table, r.Priority, r.Protocol = family, int(keepTable(index)), keepPriority, keepProtocol
		if err := netlink.RuleAdd(r); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("adding the rule for kept routes: %w", err)
		}
	}
	return nil
}

func deleteRules(all []netlink.Rule) error {
	for _, r := range all {
		if err := netlink.RuleDel(&r); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("removing the rule for kept routes: %w", err)
		}
	}
	return nil
}

// dropRules removes the rules of an interface.
func dropRules(index int) error {
	rules, err := keepRules()
	if err != nil {
		return err
	}
	return deleteRules(rules[keepTable(index)])
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
