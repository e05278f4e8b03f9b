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
	"golang.org/x/sys/unix"
)

// Routes of next-hop objects go with the carrier, before a packet can be rerouted. Each protected
// link has a routing table of weir's own with a copy of them, of no object: the copies stay. No
// rule leads there. When the link loses its carrier, [Run] adds one behind all others.
//
//   - A packet comes to the table if no other route is there for it, not even a default route. The
//     routing protocol's new route wins from its first packet on.
//   - While the link works nothing leads to the table, so a prefix that is really withdrawn is
//     unreachable at once. After a loss of the carrier it is rerouted for KeepTime at most.
//   - Routing daemons see nothing in the main table, and redistribute nothing. A route of a high
//     metric there would be announced by some, and would hide shorter prefixes of others.
//   - A rule costs every packet a quarter of plain forwarding; it is there for KeepTime at most.
//
// The copies follow the daemon's routes with [reconcile]. While the link is down they stay.

const (
	keepProtocol = 119        // of the copies, and of the rule: RTA_PROTOCOL, FRA_PROTOCOL; 5 to 255 are user space's
	keepTables   = 0x77000000 // and the interface's number: a table
	keepPriority = 0x77777777 // of the rule: behind all others
	maxKept      = 10000      // of an interface; the copies take memory
	keepMetric   = 1          // of the copies
	keepMask     = 1<<24 - 1  // interface numbers within a table's
)

// KeepTime is how long a routing protocol has for its new routes.
const KeepTime = 30 * time.Second

var keepTime = KeepTime // tests change it

func keepTable(index int) uint32 { return keepTables | uint32(index)&keepMask }

// keeper is a path of an interface that has a way for a family.
type keeper struct {
	prefixes   []netip.Prefix
	for4, for6 bool
}

// keepers are the paths of each interface whose packets are rerouted.
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

// covers says whether the path has a way for all packets to a destination.
func (k keeper) covers(to netip.Prefix) bool {
	if len(k.prefixes) > 0 && !slices.ContainsFunc(k.prefixes, func(p netip.Prefix) bool { return p.Bits() <= to.Bits() && p.Contains(to.Addr()) }) {
		return false
	}
	if to.Addr().Is4() {
		return k.for4
	}
	return k.for6
}

// copies are the routes that are kept for an interface: of destinations that go with its carrier.
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

// netlinkRoute is the route as netlink has it.
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

// reconcileKept makes the copies those of the routes as they are. It runs in the namespace.
func reconcileKept(routes []route) error {
	rules, err := keepRules()
	if err != nil {
		return err
	}
	s, err := readRoutes()
	if err != nil {
		return err
	}
	up, err := withCarriers() // behind the routes: those of a link that is up now went for another reason
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

// withCarriers are the interfaces that are up and have a carrier.
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

// keepRules are weir's rules, by table.
func keepRules() (map[uint32][]netlink.Rule, error) {
	out := map[uint32][]netlink.Rule{}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		all, err := netlink.RuleList(family)
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

// addRules has packets without another route go by an interface's table.
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

// dropRules removes those of an interface.
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
