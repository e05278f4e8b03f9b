// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// Packets come to weir's program by a route over the protected link. Two kinds of routes go
// with the link before any packet can be rerouted:
//
//   - of next-hop objects (zebra's since FRR 7.5), as soon as the carrier is lost
//     (nexthop_flush_dev in net/ipv4/nexthop.c);
//   - all others, when the device is set down (fib_disable_ip, rt6_disable_ip).
//
// A destination that has another route, to another device or, for the first kind, of no
// object, is not lost.

// rtaNHID is RTA_NH_ID of linux/rtnetlink.h: the id of a route's next-hop object.
const rtaNHID = 30

// vanishing are the destinations to which no packet comes any more.
type vanishing struct {
	carrier []netip.Prefix // once an interface has lost its carrier
	down    []netip.Prefix // once it is set down: those above, and others
}

// vanishingOf finds, for each of some interfaces, the destinations that have routes over it
// and no others that stay, in the calling thread's network namespace. Routes of the kernel's
// own do not count. It reads the whole table once: the kernel tells of next-hop objects only
// there.
func vanishingOf(indexes ...int) (map[int]vanishing, error) {
	found := map[tablePrefix]standing{}
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		req := nl.NewNetlinkRequest(unix.RTM_GETROUTE, unix.NLM_F_DUMP)
		req.AddData(&nl.RtMsg{RtMsg: unix.RtMsg{Family: uint8(family)}})
		var bad error
		err := req.ExecuteIter(unix.NETLINK_ROUTE, unix.RTM_NEWROUTE, func(b []byte) bool {
			r, ok, err := readRoute(b)
			if ok {
				found[r.tablePrefix] = found[r.tablePrefix].with(r)
			}
			bad = err
			return err == nil
		})
		if err := errors.Join(err, bad); err != nil {
			return nil, fmt.Errorf("reading routes: %w", err)
		}
	}
	out := map[int]vanishing{}
	for k, is := range found {
		if is.several || is.oif == 0 || !slices.Contains(indexes, is.oif) {
			continue
		}
		v := out[is.oif]
		v.down = append(v.down, k.to)
		if !is.plain {
			v.carrier = append(v.carrier, k.to)
		}
		out[is.oif] = v
	}
	for _, v := range out {
		for _, list := range [][]netip.Prefix{v.carrier, v.down} {
			slices.SortFunc(list, func(a, b netip.Prefix) int { return strings.Compare(a.String(), b.String()) })
		}
	}
	return out, nil
}

// tablePrefix is a destination in a table.
type tablePrefix struct {
	table uint32
	to    netip.Prefix
}

// standing is what the routes to a destination have in common.
type standing struct {
	oif     int  // that all of them use
	several bool // they use several, or one of them does
	plain   bool // one is of no next-hop object
}

func (s standing) with(r tableRoute) standing {
	if s.oif != 0 && s.oif != r.oif || r.oif == 0 {
		s.several = true
	}
	s.oif = r.oif
	s.plain = s.plain || !r.object
	return s
}

// tableRoute is what matters of a route here.
type tableRoute struct {
	tablePrefix
	oif    int  // 0: several, of a multipath route
	object bool // of a next-hop object
}

// readRoute reads a message of RTM_NEWROUTE; ok is false for what no daemon or operator made
// to forward by.
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
	r.table = uint32(m.Table)
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
		case unix.RTA_OIF, unix.RTA_TABLE, rtaNHID:
			if len(a.Value) < 4 {
				return r, false, errors.New("a route's attribute is cut")
			}
			n := binary.NativeEndian.Uint32(a.Value)
			switch a.Attr.Type {
			case unix.RTA_OIF:
				r.oif = int(n)
			case unix.RTA_TABLE:
				r.table = n
			default:
				r.object = true
			}
		}
	}
	r.to = netip.PrefixFrom(addr, int(m.Dst_len))
	return r, true, nil
}

// some writes the first few of many destinations.
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

// Vanish is what a path's interface takes along when it loses its carrier.
type Vanish struct{ Path, Text, Remedy string }

// withCarrier tells of the destinations that go with the carriers of a namespace's protected
// interfaces. Where routes cannot be read nothing is said: what reads them next fails by that.
func (w whole) withCarrier(index func(device string) (int, bool)) (out []Vanish) {
	var paths []published
	var indexes []int
	for _, p := range w.Paths {
		if i, ok := index(p.Device); ok && !slices.Contains(indexes, i) {
			paths, indexes = append(paths, p), append(indexes, i)
		}
	}
	all, err := vanishingOf(indexes...)
	if err != nil {
		return nil
	}
	for n, p := range paths {
		if v := all[indexes[n]]; len(v.carrier) > 0 {
			out = append(out, Vanish{p.Name,
				fmt.Sprintf("%s: no route is left once interface %s loses its carrier, for a daemon's next-hop object makes it: packets are refused then, not rerouted", some(v.carrier), p.Device),
				fmt.Sprintf("add a route of your own beside the daemon's: ip route add PREFIX via NEIGHBOR dev %s metric 4278190080", p.Device)})
		}
	}
	return out
}

// Vanishing tells of the destinations that go with the carriers of protected interfaces.
func Vanishing(st State) (out []Vanish) {
	for _, w := range st.wholes {
		ns, err := netns.Find(w.Netns, w.Inode)
		if err != nil {
			continue // it is gone, which others tell
		}
		_ = ns.Do(func() error {
			out = append(out, w.withCarrier(func(device string) (int, bool) {
				dev, err := netlink.LinkByName(device) // of devices that are gone others tell
				if err != nil {
					return 0, false
				}
				return dev.Attrs().Index, true
			})...)
			return nil
		})
		ns.Close()
	}
	return out
}

// GoWithDown says, after [Drain], which destinations go when the path's interface is set
// down; "" is none.
func GoWithDown(r *kernel.Root, path string) (string, error) {
	i, device, err := findPath(r, path)
	if err != nil {
		return "", err
	}
	whole, _, err := readWhole(r, i)
	if err != nil {
		return "", err
	}
	ns, err := netns.Find(whole.Netns, whole.Inode)
	if err != nil {
		return "", err
	}
	defer ns.Close()
	var v vanishing
	err = ns.Do(func() error {
		dev, err := netlink.LinkByName(device)
		if err != nil {
			return err
		}
		all, err := vanishingOf(dev.Attrs().Index)
		v = all[dev.Attrs().Index]
		return err
	})
	if err != nil || len(v.down) == 0 {
		return "", err
	}
	return fmt.Sprintf("%s have routes over interface %s alone: while it is up they are rerouted; set down, it takes the routes with it and the packets are refused. "+
		"Have the routing protocol leave the link first (its metric, or overload), or give them routes over another interface", some(v.down), device), nil
}
