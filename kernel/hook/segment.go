// SPDX-License-Identifier: Apache-2.0

package hook

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/kernel"
)

// Segment is a place of a program that no link holds: the route of an SRv6 segment whose function the program is
// (seg6local End.BPF). The route stays when nothing is pinned any more, until it is taken away or its device goes. Its
// methods run in the network namespace of the device.
type Segment struct {
	SID     netip.Addr
	Table   int // of routes; 0: main
	Ifindex int // of the device that the route names; packets come by any
}

func (s Segment) String() string { return fmt.Sprintf("segment %s", s.SID) }

// ownProtocol marks routes as weir's (rtm_protocol; from 193 on nobody else's in iproute2's list).
const ownProtocol = 217

func (s Segment) route() *netlink.Route {
	r := &netlink.Route{LinkIndex: s.Ifindex, Table: s.Table, Protocol: ownProtocol, Scope: unix.RT_SCOPE_UNIVERSE,
		Dst: &net.IPNet{IP: s.SID.AsSlice(), Mask: net.CIDRMask(128, 128)}}
	if r.Table == 0 {
		r.Table = unix.RT_TABLE_MAIN
	}
	return r
}

// Attach has the segment run prog from the next packet on, in place of the program that it ran before. A route of
// somebody else's to the same address is [ErrOccupied].
func (s Segment) Attach(prog *ebpf.Program, name string) error {
	routes, err := s.routes()
	if err != nil {
		return err
	}
	for _, r := range routes {
		if r.Protocol != ownProtocol {
			return fmt.Errorf("%s: %w: the route %s; remove it, or choose another segment", s, kernel.ErrOccupied, r)
		}
	}
	e := &netlink.SEG6LocalEncap{Action: nl.SEG6_LOCAL_ACTION_END_BPF}
	e.Flags[nl.SEG6_LOCAL_ACTION], e.Flags[nl.SEG6_LOCAL_BPF] = true, true
	if err := e.SetProg(prog.FD(), name); err != nil {
		return err
	}
	r := s.route()
	r.Encap = e
	if err := netlink.RouteReplace(r); err != nil {
		return fmt.Errorf("%s: adding its route: %w", s, err)
	}
	kernel.Step("segment:attached")
	return nil
}

// Attached says whether the route is there.
func (s Segment) Attached() (bool, error) {
	routes, err := s.routes()
	for _, r := range routes {
		if r.Protocol == ownProtocol && r.LinkIndex == s.Ifindex {
			return true, err
		}
	}
	return false, err
}

// Chosen says whether packets to the segment take its route now. It asks for that one route; Lost lists all. vrf is the device
// of the VRF whose table has the route, 0 for the main table.
func (s Segment) Chosen(vrf int) bool {
	got, err := netlink.RouteGetWithOptions(s.SID.AsSlice(), &netlink.RouteGetOptions{OifIndex: vrf})
	return err == nil && slices.ContainsFunc(got, ownRoute)
}

// Lost says whether the route is gone, as after another program removed all routes that it does not know.
func (s Segment) Lost() (bool, error) {
	routes, err := s.routes()
	return err == nil && !slices.ContainsFunc(routes, ownRoute), err
}

func ownRoute(r netlink.Route) bool { return r.Protocol == ownProtocol }

// Detach takes the route away. One that is gone is no error.
func (s Segment) Detach() error {
	r := s.route()
	r.LinkIndex = 0
	if err := netlink.RouteDel(r); err != nil && !errors.Is(err, unix.ESRCH) && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("%s: removing its route: %w", s, err)
	}
	kernel.Step("segment:detached")
	return nil
}

func (s Segment) routes() ([]netlink.Route, error) {
	r := s.route()
	all, err := netlink.RouteListFiltered(netlink.FAMILY_V6, &netlink.Route{Dst: r.Dst, Table: r.Table}, netlink.RT_FILTER_DST|netlink.RT_FILTER_TABLE)
	if err != nil {
		return nil, fmt.Errorf("%s: listing routes: %w", s, err)
	}
	return all, nil
}

// Segments are the segments of the calling thread's network namespace whose functions are programs of weir's.
func Segments() ([]Segment, error) {
	all, err := netlink.RouteListFiltered(netlink.FAMILY_V6, &netlink.Route{Protocol: ownProtocol, Table: unix.RT_TABLE_UNSPEC},
		netlink.RT_FILTER_PROTOCOL|netlink.RT_FILTER_TABLE)
	if err != nil {
		return nil, fmt.Errorf("listing routes: %w", err)
	}
	var out []Segment
	for _, r := range all {
		if _, ok := r.Encap.(*netlink.SEG6LocalEncap); !ok || r.Dst == nil {
			continue
		}
		g := Segment{Ifindex: r.LinkIndex, Table: r.Table}
		if g.Table == unix.RT_TABLE_MAIN {
			g.Table = 0
		}
		g.SID, _ = netip.AddrFromSlice(r.Dst.IP.To16())
		out = append(out, g)
	}
	return out, nil
}
