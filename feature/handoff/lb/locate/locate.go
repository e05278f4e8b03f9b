// SPDX-License-Identifier: Apache-2.0

// Package locate finds where a backend is: on a segment with the load balancer, or at the other end of a tunnel.
package locate

import (
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/tunnel"
)

// Location is where a backend is: at an interface with a MAC address, or at the end of a tunnel.
type Location struct {
	Interface int
	Device    string // its name
	MAC       net.HardwareAddr
	Tunnel    netip.Addr
	MTU       int // of the way there; of packets to the service that go through the tunnel
}

// Key is what the data path knows a backend by.
type Key struct {
	Interface int
	MAC       [6]byte
	Tunnel    netip.Addr
}

// Key is the location's: the interface and MAC address, or the end of the tunnel.
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

// Own says whether an address is of this machine, in the network namespace of the calling thread.
func Own(a netip.Addr) bool {
	routes, err := netlink.RouteGet(a.AsSlice())
	return err == nil && len(routes) > 0 && routes[0].Type == unix.RTN_LOCAL
}

// Find asks the kernel's routes where a backend is, in the network namespace of the calling thread: a backend that no router is
// before is on the segment of that interface, and its neighbour entry says which MAC address it has; any other is at the end of
// a tunnel. A backend that does not answer for its address is an error.
func Find(a netip.Addr) (Location, error) {
	routes, err := netlink.RouteGet(a.AsSlice())
	if err != nil || len(routes) == 0 {
		return Location{}, fmt.Errorf("backend at %s: there is no route to it: %w", a, err)
	}
	r := routes[0]
	if r.Type == unix.RTN_LOCAL {
		return Location{}, fmt.Errorf("backend at %s: the address is the load balancer's own: give the backend's", a)
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
	return Location{Interface: r.LinkIndex, Device: l.Attrs().Name, MAC: mac, MTU: mtu}, nil
}

// neighbourTime is how long a backend on the segment has to answer for its address.
const neighbourTime = 2 * time.Second

// neighbour asks for a MAC address if the kernel does not know it.
func neighbour(l netlink.Link, a netip.Addr) (net.HardwareAddr, error) {
	family := netlink.FAMILY_V4
	if a.Is6() {
		family = netlink.FAMILY_V6
	}
	for end := time.Now().Add(neighbourTime); ; time.Sleep(10 * time.Millisecond) {
		all, err := netlink.NeighList(l.Attrs().Index, family)
		if err != nil {
			return nil, fmt.Errorf("listing neighbours: %w", err)
		}
		for _, n := range all {
			at, _ := netip.AddrFromSlice(n.IP)
			if at.Unmap() == a && len(n.HardwareAddr) == 6 && n.State&(netlink.NUD_FAILED|netlink.NUD_INCOMPLETE|netlink.NUD_NONE) != n.State {
				if n.State&netlink.NUD_STALE != 0 {
					_ = poke(a) // the kernel asks whether it is there still, and the next look sees what it found
				}
				return n.HardwareAddr, nil
			}
		}
		if time.Now().After(end) {
			return nil, fmt.Errorf("nobody on %s answers for its address: is the backend up?", l.Attrs().Name)
		}
		if err := poke(a); err != nil {
			return nil, err
		}
	}
}

// poke sends a packet to a backend: any one has the kernel ask for its MAC address, and the port of discard hurts nobody.
func poke(a netip.Addr) error {
	c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(a, 9)))
	if err != nil {
		return err
	}
	_, _ = c.Write([]byte{0}) // unreachable, as it was found before
	return c.Close()
}
