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

	"github.com/weir-project/weir/internal/dump"
	"github.com/weir-project/weir/kernel"
)

// Segment is a hook without a link: the route of an SRv6 segment with a program as its function (seg6local End.BPF). The
// route survives the pins, until it or its device is removed. The methods run in the network namespace of the device.
type Segment struct {
	SID     netip.Addr
	Table   int // routing table; 0: main
	Ifindex int // device named by the route; packets may arrive by any device
}

func (s Segment) String() string { return fmt.Sprintf("segment %s", s.SID) }

// ownProtocol marks routes as weir's (rtm_protocol). iproute2's list has no entries from 193 on.
const ownProtocol = 217

func (s Segment) route() *netlink.Route {
	r := &netlink.Route{LinkIndex: s.Ifindex, Table: s.Table, Protocol: ownProtocol, Scope: unix.RT_SCOPE_UNIVERSE,
		Dst: &net.IPNet{IP: s.SID.AsSlice(), Mask: net.CIDRMask(128, 128)}}
	if r.Table == 0 {
		r.Table = unix.RT_TABLE_MAIN
	}
	return r
}

// Attach makes the segment run prog from the next packet on. It replaces the previous program. It returns [kernel.ErrOccupied]
// if a foreign route to the same address exists.
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
		return fmt.Errorf("%s: add its route: %w", s, err)
	}
	kernel.Step("segment:attached")
	return nil
}

// Attached reports whether the route exists.
func (s Segment) Attached() (bool, error) {
	routes, err := s.routes()
	for _, r := range routes {
		if r.Protocol == ownProtocol && r.LinkIndex == s.Ifindex {
			return true, err
		}
	}
	return false, err
}

// Chosen reports whether packets to the segment now take its route. It looks up that one route, while Lost lists all
// routes. vrf is the device of the VRF with the route's table, or 0 for the main table.
func (s Segment) Chosen(vrf int) bool {
	got, err := netlink.RouteGetWithOptions(s.SID.AsSlice(), &netlink.RouteGetOptions{OifIndex: vrf})
	return err == nil && slices.ContainsFunc(got, ownRoute)
}

// Lost reports whether the route is gone, for example removed by a program that deletes unknown routes.
func (s Segment) Lost() (bool, error) {
	routes, err := s.routes()
	return err == nil && !slices.ContainsFunc(routes, ownRoute), err
}

func ownRoute(r netlink.Route) bool { return r.Protocol == ownProtocol }

// Detach removes the route. A missing route is not an error.
func (s Segment) Detach() error {
	r := s.route()
	r.LinkIndex = 0
	if err := netlink.RouteDel(r); err != nil && !errors.Is(err, unix.ESRCH) && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("%s: remove its route: %w", s, err)
	}
	kernel.Step("segment:detached")
	return nil
}

func (s Segment) routes() ([]netlink.Route, error) {
	r := s.route()
	all, err := dump.RouteListFiltered(netlink.FAMILY_V6, &netlink.Route{Dst: r.Dst, Table: r.Table}, netlink.RT_FILTER_DST|netlink.RT_FILTER_TABLE)
	if err != nil {
		return nil, fmt.Errorf("%s: list routes: %w", s, err)
	}
	return all, nil
}

// Segments returns weir's segments in the calling thread's network namespace.
func Segments() ([]Segment, error) {
	all, err := dump.RouteListFiltered(netlink.FAMILY_V6, &netlink.Route{Protocol: ownProtocol, Table: unix.RT_TABLE_UNSPEC},
		netlink.RT_FILTER_PROTOCOL|netlink.RT_FILTER_TABLE)
	if err != nil {
		return nil, fmt.Errorf("list routes: %w", err)
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
