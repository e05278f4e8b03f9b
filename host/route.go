// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/netns"
	"golang.org/x/sys/unix"
)

// delivery is the result of the kernel's routing for an arriving packet.
type delivery int

const (
	deliverOne     delivery = iota // socket lookup
	deliverEvery                   // broadcast and multicast: every socket gets it, without a lookup program
	deliverForward                 // forwarded, and handled by a feature on its way out
	deliverNone                    // forwarded or dropped
)

// route reports whether the host delivers a packet: only routes of type local, broadcast or multicast lead to sockets.
// taken means that a feature handles it if it is not local.
func route(ns *netns.Handle, p feature.Packet, taken bool) (d delivery, why feature.ExplainStep, result string, err error) {
	why.Step = "route"
	var r netlink.Route
	err = ns.Do(func() error {
		r, err = findRoute(p)
		return err
	})
	to := p.To.Addr()
	if to.Is6() && to.IsMulticast() { // IPv6 has no other type for multicast on input
		r.Type, err = unix.RTN_MULTICAST, nil
	}
	if err != nil {
		why.Text, why.Warning = refused(p, err, taken), true
		return deliverNone, why, "not delivered: " + why.Text, nil
	}
	switch r.Type {
	case unix.RTN_LOCAL, unix.RTN_ANYCAST:
		why.Text = fmt.Sprintf("%s is local", to)
		return deliverOne, why, "", nil
	case unix.RTN_BROADCAST, unix.RTN_MULTICAST:
		kind := map[bool]string{true: "a broadcast", false: "a multicast"}[r.Type == unix.RTN_BROADCAST]
		why.Text, why.Warning = fmt.Sprintf("%s is %s address: every socket bound to it gets the packet, without a lookup program", to, kind), true
		if p.Proto == "tcp" {
			return deliverNone, why, fmt.Sprintf("dropped: TCP accepts no connections to %s address", kind), nil
		}
		return deliverEvery, why, "", nil
	case unix.RTN_UNICAST:
		if taken {
			if d, why.Text, result = deliverForward, fmt.Sprintf("%s is not local: its route leads to %s", to, deviceName(ns, r.LinkIndex)), ""; forwardingOff(ns, p) {
				d, why.Warning, result = deliverNone, true, "dropped: IPv6 forwarding is off: sysctl net.ipv6.conf.all.forwarding=1"
			}
			return d, why, result, nil
		}
		why.Warning = true
		if isRouter(ns, to) { // a local route would capture packets to be forwarded
			why.Text = fmt.Sprintf("%s is not local: this host forwards it by %s, and no socket here gets it", to, deviceName(ns, r.LinkIndex))
		} else {
			why.Text = fmt.Sprintf("%s is not local, and forwarding is off. To deliver it to sockets: ip route add local %s dev lo", to, to)
		}
		return deliverNone, why, fmt.Sprintf("not delivered on this host: %s is not local", to), nil
	}
	why.Text, why.Warning = fmt.Sprintf("a route of type %s drops packets to %s", typeName(r.Type), to), true
	return deliverNone, why, "dropped: " + why.Text, nil
}

func typeName(t int) string {
	switch t {
	case unix.RTN_BLACKHOLE:
		return "blackhole"
	case unix.RTN_UNREACHABLE:
		return "unreachable"
	case unix.RTN_PROHIBIT:
		return "prohibit"
	}
	return fmt.Sprint(t)
}

// deviceName returns the name of an interface.
func deviceName(ns *netns.Handle, index int) (name string) {
	name = fmt.Sprint("interface ", index)
	_ = ns.Do(func() error { // it may be gone
		if l, err := netlink.LinkByIndex(index); err == nil {
			name = l.Attrs().Name
		}
		return nil
	})
	return name
}

// isRouter reports whether a network namespace forwards packets of the address's family.
func isRouter(ns *netns.Handle, to netip.Addr) (yes bool) {
	sysctl := "/proc/sys/net/ipv4/ip_forward"
	if to.Is6() {
		sysctl = "/proc/sys/net/ipv6/conf/all/forwarding"
	}
	_ = ns.Do(func() error { // without the sysctl nothing is forwarded
		b, err := os.ReadFile(sysctl)
		yes = err == nil && strings.TrimSpace(string(b)) != "0"
		return nil
	})
	return yes
}

// forwardingOff reports whether the kernel drops an arriving packet for another host. For IPv4 its routes show this.
func forwardingOff(ns *netns.Handle, p feature.Packet) (off bool) {
	_ = ns.Do(func() error { // without the sysctl nothing is forbidden
		if l, err := netlink.LinkByName(p.Interface); err == nil && l.Attrs().Flags&net.FlagLoopback == 0 && p.To.Addr().Is6() {
			b, err := os.ReadFile("/proc/sys/net/ipv6/conf/all/forwarding")
			off = err == nil && strings.TrimSpace(string(b)) == "0"
		}
		return nil
	})
	return off
}

// findRoute looks up the route of an arriving packet, or of one sent by this host to itself.
func findRoute(p feature.Packet) (netlink.Route, error) {
	o := &netlink.RouteGetOptions{}
	if l, err := netlink.LinkByName(p.Interface); err == nil && l.Attrs().Flags&net.FlagLoopback == 0 {
		o.IifIndex, o.SrcAddr = l.Attrs().Index, p.From.Addr().AsSlice()
	}
	routes, err := netlink.RouteGetWithOptions(p.To.Addr().AsSlice(), o)
	if err != nil {
		return netlink.Route{}, err
	}
	if len(routes) == 0 {
		return netlink.Route{}, unix.ENETUNREACH
	}
	return routes[0], nil
}

// refused describes why the kernel has no route for an arriving packet.
func refused(p feature.Packet, err error, taken bool) string {
	to := p.To.Addr()
	switch {
	case errors.Is(err, unix.EXDEV):
		return fmt.Sprintf("reverse path filter: the route to %s does not lead through %s: see net.ipv4.conf.%s.rp_filter", p.From.Addr(), p.Interface, p.Interface)
	case errors.Is(err, unix.EINVAL) && to.IsMulticast():
		return fmt.Sprintf("no socket on this host has joined the group %s at %s", to, p.Interface)
	case errors.Is(err, unix.EINVAL):
		return fmt.Sprintf("the kernel treats a packet from %s at %s as martian: its reverse path filter finds no route back, or a route drops packets to %s", p.From.Addr(), p.Interface, to)
	case taken && errors.Is(err, unix.EHOSTUNREACH):
		return fmt.Sprintf("%s is not local, and the kernel does not forward packets from %s: see net.ipv4.conf.%s.forwarding, and ip route get %s", to, p.Interface, p.Interface, to)
	case errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.ENETUNREACH):
		return fmt.Sprintf("%s is not local, and there is no route to it. To deliver it to sockets: ip route add local %s dev lo", to, to)
	case errors.Is(err, unix.EACCES):
		return fmt.Sprintf("a route of type prohibit drops packets to %s", to)
	}
	return fmt.Sprintf("no route to %s: %v", to, err)
}
