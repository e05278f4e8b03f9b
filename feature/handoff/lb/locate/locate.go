// SPDX-License-Identifier: Apache-2.0

// Package locate finds the location of a backend: on a segment of the load balancer, or at the
// other end of a tunnel.
package locate

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/tunnel"
	"github.com/weir-project/weir/internal/dump"
)

// Location is an interface and a MAC address on its segment, or the end of a tunnel.
type Location struct {
	Interface int
	Device    string // name of the interface
	MAC       net.HardwareAddr
	Tunnel    netip.Addr
	MTU       int // MTU of the path; for a tunnel, of the packets inside
}

// Key identifies a backend in the data path.
type Key struct {
	Interface int
	MAC       [6]byte
	Tunnel    netip.Addr
}

// Key returns the interface and MAC address, or the end of the tunnel.
func (l Location) Key() Key {
	if l.Tunnel.IsValid() {
		return Key{Tunnel: l.Tunnel.Unmap()}
	}
	p := Key{Interface: l.Interface}
	copy(p.MAC[:], l.MAC)
	return p
}

func (p Key) String() string {
	if p.Tunnel.IsValid() {
		return "the tunnel to " + p.Tunnel.String()
	}
	return fmt.Sprintf("%s of interface %d", net.HardwareAddr(p.MAC[:]), p.Interface)
}

// Own reports whether an address belongs to this machine, in the network namespace of the calling
// thread.
func Own(a netip.Addr) bool {
	routes, err := netlink.RouteGet(a.AsSlice())
	return err == nil && len(routes) > 0 && routes[0].Type == unix.RTN_LOCAL
}

// Unrouted returns the addresses without a route to an interface, in the network namespace of the calling thread.
func Unrouted(all []netip.Addr, ifindex int) []netip.Addr {
	return slices.DeleteFunc(all, func(a netip.Addr) bool {
		got, err := netlink.RouteGet(a.AsSlice())
		return err == nil && slices.ContainsFunc(got, func(r netlink.Route) bool { return r.LinkIndex == ifindex })
	})
}

// Missing reports whether the network namespace of the calling thread has no interface of an index.
func Missing(ifindex int) bool {
	_, err := netlink.LinkByIndex(ifindex)
	return errors.As(err, &netlink.LinkNotFoundError{})
}

// Find locates a backend by the kernel's routes, in the network namespace of the calling thread. A
// backend without a router before it is on the segment of the route's interface, and its neighbour
// entry has the MAC address. Every other backend is at the end of a tunnel. Find fails if a backend
// on the segment does not answer for its address.
func Find(a netip.Addr) (Location, error) {
	routes, err := netlink.RouteGet(a.AsSlice())
	if err != nil || len(routes) == 0 {
		return Location{}, fmt.Errorf("backend at %s: no route: %w", a, err)
	}
	r := routes[0]
	if r.Type == unix.RTN_LOCAL {
		return Location{}, fmt.Errorf("backend at %s: the address is the load balancer's own: give the backend's", a)
	}
	if r.Type != unix.RTN_UNICAST && r.Type != unix.RTN_UNSPEC { // all hosts of a segment would get its packets
		return Location{}, fmt.Errorf("backend at %s: not a unicast address by the routes here: give the backend's", a)
	}
	l, err := netlink.LinkByIndex(r.LinkIndex)
	if err != nil {
		return Location{}, fmt.Errorf("backend at %s: %w", a, err)
	}
	mtu := l.Attrs().MTU
	if r.MTU > 0 {
		mtu = r.MTU
	}
	if r.Gw != nil || r.Via != nil || len(l.Attrs().HardwareAddr) != 6 {
		over := tunnel.Over4
		if a.Is6() {
			over = tunnel.Over6
		}
		return Location{Tunnel: a, MTU: mtu - over}, nil
	}
	mac, err := neighbour(l, a)
	if err != nil {
		return Location{}, fmt.Errorf("backend at %s: %w", a, err)
	}
	if mac[0]&1 == 1 {
		return Location{}, fmt.Errorf("backend at %s: its MAC address %s is a group's: remove the neighbour entry (ip neigh)", a, mac)
	}
	return Location{Interface: r.LinkIndex, Device: l.Attrs().Name, MAC: mac, MTU: mtu}, nil
}

// Has reports whether another address leads to the location, too. See [Find].
func (l Location) Has(a netip.Addr) bool {
	at, err := Find(a)
	return err == nil && at.Key() == l.Key()
}

// neighbourTime is how long a backend on the segment may take to answer for its address.
const neighbourTime = 2 * time.Second

// neighbour returns the MAC address of a neighbour. It makes the kernel ask for an unknown one.
func neighbour(l netlink.Link, a netip.Addr) (net.HardwareAddr, error) {
	family := netlink.FAMILY_V4
	if a.Is6() {
		family = netlink.FAMILY_V6
	}
	for end := time.Now().Add(neighbourTime); ; time.Sleep(10 * time.Millisecond) {
		all, err := dump.NeighList(l.Attrs().Index, family)
		if err != nil {
			return nil, fmt.Errorf("list neighbours: %w", err)
		}
		for _, n := range all {
			at, _ := netip.AddrFromSlice(n.IP)
			if at.Unmap() == a && len(n.HardwareAddr) == 6 && n.State&(netlink.NUD_FAILED|netlink.NUD_INCOMPLETE|netlink.NUD_NONE) != n.State {
				if n.State&netlink.NUD_STALE != 0 {
					_ = poke(a) // the kernel checks the entry, and the next locate finds the result
				}
				return n.HardwareAddr, nil
			}
		}
		if time.Now().After(end) {
			return nil, fmt.Errorf("no answer for its address on %s: is the backend up?", l.Attrs().Name)
		}
		if err := poke(a); err != nil {
			return nil, err
		}
	}
}

// poke sends a packet to a backend, so the kernel resolves its MAC address. The discard port
// ignores it.
func poke(a netip.Addr) error {
	c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(a, 9)))
	if err != nil {
		return err
	}
	_, _ = c.Write([]byte{0}) // the neighbour may not be reachable yet
	return c.Close()
}

// InterfaceMAC returns the MAC address of an interface, in the network namespace of the calling thread.
func InterfaceMAC(index int) ([6]uint8, error) {
	i, err := net.InterfaceByIndex(index)
	if err != nil {
		return [6]uint8{}, fmt.Errorf("interface %d: %w", index, err)
	}
	if len(i.HardwareAddr) != 6 {
		return [6]uint8{}, fmt.Errorf("interface %s has no Ethernet address", i.Name)
	}
	return [6]uint8(i.HardwareAddr), nil
}
