// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// Packets reach weir's program by a route over the protected link. Two kinds of routes vanish before any packet can
// be rerouted:
//
//   - routes with next-hop objects (zebra since FRR 7.5), at the loss of the carrier (nexthop_flush_dev in
//     net/ipv4/nexthop.c);
//   - all others, when the device is set down (fib_disable_ip, rt6_disable_ip).
//
// A destination survives with another route: to another device or, at the loss of the carrier, without a next-hop
// object.

// rtaNHID is RTA_NH_ID of linux/rtnetlink.h: the id of a route's next-hop object.
const rtaNHID = 30

// lone is a destination with routes over one interface only.
type lone struct {
	tablePrefix
	via     netip.Addr // gateway of the best route; invalid: none
	proto   uint8      // origin of the best route
	carrier bool       // all routes have next-hop objects and vanish with the carrier
}

// survey is a summary of a namespace's routing tables.
type survey struct {
	routes map[tablePrefix]standing
	kept   map[tableRoute]bool // weir's own routes: keep.go
}

// readRoutes surveys the calling thread's network namespace. It ignores the kernel's own routes. It dumps the whole
// table once, because only a dump includes next-hop objects.
func readRoutes() (s survey, err error) {
	s = survey{map[tablePrefix]standing{}, map[tableRoute]bool{}}
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		req := nl.NewNetlinkRequest(unix.RTM_GETROUTE, unix.NLM_F_DUMP)
		req.AddData(&nl.RtMsg{RtMsg: unix.RtMsg{Family: uint8(family)}})
		var bad error
		err := req.ExecuteIter(unix.NETLINK_ROUTE, unix.RTM_NEWROUTE, func(b []byte) bool {
			r, ok, err := readRoute(b)
			switch {
			case ok && r.proto == keepProtocol:
				s.kept[r] = true
			case ok:
				s.routes[r.tablePrefix] = s.routes[r.tablePrefix].with(r)
			}
			bad = err
			return err == nil
		})
		if err := errors.Join(err, bad); err != nil {
			return s, fmt.Errorf("reading routes: %w", err)
		}
	}
	return s, nil
}

// alone returns, for each given interface, the destinations with routes over this interface only.
func (s survey) alone(indexes ...int) map[int][]lone {
	out := map[int][]lone{}
	for k, is := range s.routes {
		if !is.several && is.oif != 0 && slices.Contains(indexes, is.oif) {
			out[is.oif] = append(out[is.oif], lone{k, is.via, is.proto, !is.plain})
		}
	}
	for _, list := range out {
		slices.SortFunc(list, func(a, b lone) int {
			return cmp.Or(strings.Compare(a.to.String(), b.to.String()), cmp.Compare(a.table, b.table))
		})
	}
	return out
}

// destinations returns the prefixes of the selected destinations.
func destinations(all []lone, which func(lone) bool) (out []netip.Prefix) {
	for _, l := range all {
		if which(l) {
			out = append(out, l.to)
		}
	}
	return out
}

// tablePrefix is a destination in a routing table.
type tablePrefix struct {
	table uint32
	to    netip.Prefix
}

// standing summarizes the routes to a destination.
type standing struct {
	oif      int  // used by all of them
	several  bool // the routes use several interfaces, or one of them does
	plain    bool // one has no next-hop object
	priority uint32
	via      netip.Addr // of the route with the best priority
	proto    uint8
}

func (s standing) with(r tableRoute) standing {
	if s.oif != 0 && s.oif != r.oif || r.oif == 0 {
		s.several = true
	}
	if s.oif == 0 || r.priority < s.priority {
		s.priority, s.via, s.proto = r.priority, r.via, r.proto
	}
	s.oif = r.oif
	s.plain = s.plain || !r.object
	return s
}

// tableRoute holds the relevant attributes of a route.
type tableRoute struct {
	tablePrefix
	oif      int  // 0: several, in a multipath route
	object   bool // uses a next-hop object
	via      netip.Addr
	proto    uint8
	priority uint32
}

// readRoute parses a message of RTM_NEWROUTE. ok is false unless a daemon or an operator made the route for
// forwarding.
func readRoute(b []byte) (r tableRoute, ok bool, err error) {
	if len(b) < unix.SizeofRtMsg {
		return r, false, errors.New("a route's message is cut")
	}
	m := nl.DeserializeRtMsg(b)
	if m.Type != unix.RTN_UNICAST || m.Protocol == unix.RTPROT_KERNEL || m.Protocol == unix.RTPROT_RA || m.Flags&unix.RTM_F_CLONED != 0 {
		return r, false, nil
	}
	attrs, err := nl.ParseRouteAttr(b[unix.SizeofRtMsg:])
	if err != nil {
		return r, false, err
	}
	r.table, r.proto = uint32(m.Table), m.Protocol
	addr := netip.IPv4Unspecified()
	if m.Family == unix.AF_INET6 {
		addr = netip.IPv6Unspecified()
	}
	for _, a := range attrs {
		switch a.Attr.Type {
		case unix.RTA_DST:
			if got, ok := netip.AddrFromSlice(a.Value); ok {
				addr = got
			}
		case unix.RTA_GATEWAY:
			r.via, _ = netip.AddrFromSlice(a.Value)
		case unix.RTA_VIA:
			if len(a.Value) > 2 { // struct rtvia: the family precedes the address
				r.via, _ = netip.AddrFromSlice(a.Value[2:])
			}
		case unix.RTA_OIF, unix.RTA_TABLE, unix.RTA_PRIORITY, rtaNHID:
			if len(a.Value) < 4 {
				return r, false, errors.New("a route's attribute is cut")
			}
			n := binary.NativeEndian.Uint32(a.Value)
			switch a.Attr.Type {
			case unix.RTA_OIF:
				r.oif = int(n)
			case unix.RTA_TABLE:
				r.table = n
			case unix.RTA_PRIORITY:
				r.priority = n
			default:
				r.object = true
			}
		}
	}
	r.to = netip.PrefixFrom(addr, int(m.Dst_len))
	return r, true, nil
}

// some lists the first few of many destinations.
func some(all []netip.Prefix) string {
	const shown = 3
	var words []string
	for _, p := range all[:min(shown, len(all))] {
		words = append(words, p.String())
	}
	text := strings.Join(words, ", ")
	if more := len(all) - shown; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// Vanish is a loss of routes with the carrier of a path's interface.
type Vanish struct{ Path, Text, Remedy string }

// withCarrier lists the destinations lost with a protected interface's carrier and not rerouted then. If routes are
// unreadable, it returns nothing; the next reader fails.
func (w scopeSpec) withCarrier(routes []route) (out []Vanish) {
	paths := map[int]*published{} // the first path of each interface
	for _, r := range routes {
		if paths[r.ifindex] == nil {
			paths[r.ifindex] = r.path
		}
	}
	s, err := readRoutes()
	if err != nil {
		return nil
	}
	keepers := keepers(routes)
	for index, all := range s.alone(slices.Collect(maps.Keys(paths))...) {
		kept := map[tablePrefix]bool{}
		for _, r := range copies(index, all, keepers[index]) {
			kept[tablePrefix{unix.RT_TABLE_MAIN, r.to}] = true
		}
		p := paths[index]
		own := fmt.Sprintf("add a route of your own beside the daemon's: ip route add PREFIX via NEIGHBOR dev %s metric 4278190080", p.Device)
		const goes = "%s: no route is left once interface %s loses its carrier, because its route has a daemon's next-hop object: "
		if refused := destinations(all, func(l lone) bool { return l.carrier && !kept[l.tablePrefix] }); len(refused) > 0 {
			out = append(out, Vanish{p.Name, fmt.Sprintf(goes+"packets are rejected then, not rerouted", some(refused), p.Device), own})
		}
		if held := destinations(all, func(l lone) bool { return kept[l.tablePrefix] }); len(held) > 0 && !w.followed {
			out = append(out, Vanish{p.Name, fmt.Sprintf(goes+"packets are rerouted then only while weir serve runs", some(held), p.Device), "run weir serve, or " + own})
		}
	}
	slices.SortFunc(out, func(a, b Vanish) int { return cmp.Or(cmp.Compare(a.Path, b.Path), cmp.Compare(a.Text, b.Text)) })
	return out
}

// Vanishing lists the destinations lost with the carriers of protected interfaces.
func Vanishing(st State) (out []Vanish) {
	for _, w := range st.wholes {
		ns, err := netns.Find(w.Netns, w.ID)
		if err != nil {
			continue // the namespace is gone, as reported elsewhere
		}
		_ = ns.Do(func() error {
			r, err := newResolver()
			if err == nil {
				out = append(out, w.withCarrier(r.all(w.Paths))...)
			}
			return err
		})
		ns.Close()
	}
	return out
}

// GoWithDown returns, after [Drain], the destinations lost if the path's interface is set down, or "".
func GoWithDown(r *kernel.Root, path string) (string, error) {
	i, device, err := findPath(r, path)
	if err != nil {
		return "", err
	}
	whole, err := readSpec(r, i)
	if err != nil {
		return "", err
	}
	ns, err := netns.Find(whole.Netns, whole.ID)
	if err != nil {
		return "", err
	}
	defer ns.Close()
	var all []netip.Prefix
	err = ns.Do(func() error {
		dev, err := netlink.LinkByName(device)
		if err != nil {
			return err
		}
		s, err := readRoutes()
		all = destinations(s.alone(dev.Attrs().Index)[dev.Attrs().Index], func(lone) bool { return true })
		return err
	})
	if err != nil || len(all) == 0 {
		return "", err
	}
	return fmt.Sprintf("%s have routes over interface %s only: while it is up they are rerouted; setting it down deletes the routes and packets are rejected. "+
		"First make the routing protocol leave the link (its metric, or overload), or add routes over another interface", some(all), device), nil
}
