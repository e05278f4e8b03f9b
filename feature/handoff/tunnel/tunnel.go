// SPDX-License-Identifier: Apache-2.0

// Package tunnel creates the load balancer's end of VXLAN tunnels (RFC 7348) to backends behind
// routers. Every Debian kernel has VXLAN. It carries IPv4 and IPv6 over either. Routers and network
// cards can spread it, because its source port is a hash of the inner packet. It keeps segmentation
// offloads. The load balancer has one device for all backends. A backend has an ordinary device to
// its load balancer, without a BPF program:
//
//	ip link add weir-tun address 02:77:65:69:72:02 type vxlan id 22341 dstport 4789 srcport 512 1023 local HOST remote LB nolearning udp6zerocsumrx
//	ip link set weir-tun mtu 1450 up          # the underlay's less 50 (IPv4) or 70 (IPv6)
//	ip neigh add 169.254.85.1 lladdr 02:77:65:69:72:01 dev weir-tun nud permanent
//	ip route add default via 169.254.85.1 dev weir-tun onlink table 22341
//	ip rule add from SERVICE lookup 22341     # answers return through the tunnel, past the load balancer
//
// Packets are not authenticated. As on a segment, anybody able to send to the port from a backend's
// address can impersonate the backend. Both ends send from ports open only to root, so a filter can
// drop packets of other users.
package tunnel

import (
	"errors"
	"fmt"
	"net"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// These are the constants of both ends.
const (
	VNI  = 22341 // of the packets; also the number of the backend's routing table
	Port = 4789
	// Device is the default name of the device at both ends.
	Device = "weir-tun"
	// Over4 and Over6 are the bytes added to each packet over IPv4 and IPv6.
	Over4, Over6 = 50, 70
	// PortLow and PortHigh are the range of outer source ports. It is below
	// net.ipv4.ip_unprivileged_port_start.
	PortLow, PortHigh = 512, 1023
)

// LBMAC and BackendMAC are the link addresses inside the tunnel. They are the same everywhere, so
// no end has to learn them.
var (
	LBMAC      = net.HardwareAddr{2, 'w', 'e', 'i', 'r', 1}
	BackendMAC = net.HardwareAddr{2, 'w', 'e', 'i', 'r', 2}
)

// NewLB creates a load balancer's device, or opens the existing one, and returns its index. mtu is
// the MTU inside the tunnel: the least path MTU to the backends, less [Over4] or [Over6].
func NewLB(name string, mtu int) (int, error) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.HardwareAddr, attrs.MTU = name, LBMAC, mtu
	l, err := add(&netlink.Vxlan{LinkAttrs: attrs, FlowBased: true, Port: Port, PortLow: PortLow, PortHigh: PortHigh, UDP6ZeroCSumRx: true, UDPCSum: false})
	if err != nil {
		return 0, err
	}
	if v, ok := l.(*netlink.Vxlan); !ok || !v.FlowBased || v.Port != Port {
		return 0, fmt.Errorf("device %s belongs to another program: delete or rename it", name)
	}
	return l.Attrs().Index, raise(l, mtu)
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
