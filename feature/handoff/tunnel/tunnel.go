// SPDX-License-Identifier: Apache-2.0

// Package tunnel makes the two ends of the way between a front end and a host that routers are between: VXLAN (RFC 7348), which
// every Debian kernel has, carries IPv4 and IPv6 over either, is spread by routers and network cards (its source port is a hash of
// what it carries), and keeps segmentation offloads. The front end has one device for all hosts; a host has one towards its front
// end, an ordinary device without any program:
//
//	ip link add weir-tun address 02:77:65:69:72:02 type vxlan id 22341 dstport 4789 local HOST remote FRONT nolearning udp6zerocsumrx
//	ip link set weir-tun mtu 1450 up          # the underlay's less 50 (IPv4) or 70 (IPv6)
//	ip neigh add 169.254.85.1 lladdr 02:77:65:69:72:01 dev weir-tun nud permanent
//	ip route add default via 169.254.85.1 dev weir-tun onlink table 22341
//	ip rule add from SERVICE lookup 22341     # answers go the way the questions came, past the front end
//
// Packets are not authenticated: as on a segment, whoever can send to the port from a host's address can speak for the host.
package tunnel

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// What both ends agree on.
const (
	VNI  = 22341 // of the packets; also the number of the host's routing table
	Port = 4789
	// Device is its name at both ends, unless told otherwise.
	Device = "weir-tun"
	// Over4 and Over6 are the bytes that a packet gets in front of it over IPv4 and IPv6.
	Over4, Over6 = 50, 70
)

// FrontMAC and HostMAC are the link addresses of the ends within the tunnel, the same everywhere: nobody has to learn them.
var (
	FrontMAC = net.HardwareAddr{2, 'w', 'e', 'i', 'r', 1}
	HostMAC  = net.HardwareAddr{2, 'w', 'e', 'i', 'r', 2}
	gateway4 = netip.MustParseAddr("169.254.85.1")
	gateway6 = netip.MustParseAddr("fe80::7765:6972")
)

// NewFront makes a front end's device, or takes the one that is there, and returns its index. mtu is that of what goes through
// it: the least of the ways to the hosts, less [Over4] or [Over6].
func NewFront(name string, mtu int) (int, error) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.HardwareAddr, attrs.MTU = name, FrontMAC, mtu
	l, err := add(&netlink.Vxlan{LinkAttrs: attrs, FlowBased: true, Port: Port, UDP6ZeroCSumRx: true, UDPCSum: false})
	if err != nil {
		return 0, err
	}
	if v, ok := l.(*netlink.Vxlan); !ok || !v.FlowBased || v.Port != Port {
		return 0, fmt.Errorf("device %s is somebody else's: take another name", name)
	}
	return l.Attrs().Index, raise(l, mtu)
}

// End is a host's end.
type End struct {
	Name     string // of the device; [Device] if empty
	Local    netip.Addr
	Front    netip.Addr
	MTU      int          // of what goes through it
	Services []netip.Addr // whose packets go back through it
}

// NewHost makes a host's end, in the network namespace of the calling thread. What is there already stays.
func NewHost(e End) error {
	if e.Name == "" {
		e.Name = Device
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.HardwareAddr, attrs.MTU = e.Name, HostMAC, e.MTU
	l, err := add(&netlink.Vxlan{LinkAttrs: attrs, VxlanId: VNI, Port: Port, SrcAddr: e.Local.AsSlice(), Group: e.Front.AsSlice(), UDP6ZeroCSumRx: true})
	if err != nil {
		return err
	}
	if err := raise(l, e.MTU); err != nil {
		return err
	}
	for _, s := range e.Services {
		if err := answers(l, s); err != nil {
			return fmt.Errorf("the way back from %s: %w", s, err)
		}
	}
	return nil
}

// answers has what a service sends go to the front end.
func answers(l netlink.Link, service netip.Addr) error {
	gateway, family, bits := gateway4, netlink.FAMILY_V4, 32
	if service.Is6() {
		gateway, family, bits = gateway6, netlink.FAMILY_V6, 128
	}
	err := netlink.NeighSet(&netlink.Neigh{LinkIndex: l.Attrs().Index, IP: gateway.AsSlice(), HardwareAddr: FrontMAC, State: netlink.NUD_PERMANENT})
	if err != nil {
		return fmt.Errorf("neighbour %s: %w", gateway, err)
	}
	all := &net.IPNet{IP: make(net.IP, bits/8), Mask: net.CIDRMask(0, bits)}
	err = netlink.RouteReplace(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: all, Gw: gateway.AsSlice(), Table: VNI, Flags: int(netlink.FLAG_ONLINK)})
	if err != nil {
		return fmt.Errorf("route: %w", err)
	}
	r := netlink.NewRule()
	r.Family, r.Table, r.Priority = family, VNI, VNI
	r.Src = &net.IPNet{IP: service.AsSlice(), Mask: net.CIDRMask(bits, bits)}
	if err := netlink.RuleAdd(r); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("rule: %w", err)
	}
	return nil
}

func add(l *netlink.Vxlan) (netlink.Link, error) {
	if err := netlink.LinkAdd(l); errors.Is(err, unix.EOPNOTSUPP) {
		return nil, fmt.Errorf("device %s: %w: the kernel needs CONFIG_VXLAN (Debian has it as module vxlan)", l.Name, err)
	} else if err != nil && !errors.Is(err, os.ErrExist) {
		return nil, fmt.Errorf("device %s: %w (another VXLAN device on port %d?)", l.Name, err, Port)
	}
	return netlink.LinkByName(l.Name)
}

func raise(l netlink.Link, mtu int) error {
	if err := netlink.LinkSetMTU(l, mtu); err != nil {
		return fmt.Errorf("device %s: MTU %d: %w", l.Attrs().Name, mtu, err)
	}
	if err := netlink.LinkSetUp(l); err != nil {
		return fmt.Errorf("device %s: %w", l.Attrs().Name, err)
	}
	return nil
}
