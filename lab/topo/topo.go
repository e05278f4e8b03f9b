// SPDX-License-Identifier: Apache-2.0

// Package topo connects network namespaces for experiments.
package topo

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
)

// End is one side of a cable.
type End struct {
	NS    *netns.Handle
	Name  string // of the interface, at most 15 bytes
	Addrs []netip.Prefix
}

// Cable creates a veth pair between two namespaces and assigns the addresses of its ends. IPv6 addresses
// are usable at once: a private cable needs no duplicate address detection, and it would take seconds.
func Cable(a, b End) error {
	err := a.NS.Do(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = a.Name
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: b.Name, PeerNamespace: netlink.NsFd(b.NS.FD())})
	})
	if err != nil {
		return fmt.Errorf("create the cable %s–%s: %w", a.Name, b.Name, err)
	}
	for _, e := range []End{a, b} {
		if err := Configure(e); err != nil {
			return err
		}
	}
	return nil
}

// Configure assigns the addresses of an existing interface and brings it up.
func Configure(e End) error {
	if err := e.NS.Do(func() error { return configure(e.Name, e.Addrs) }); err != nil {
		return fmt.Errorf("configure %s: %w", e.Name, err)
	}
	return nil
}

// Addresses adds addresses to the loopback interface, where a host keeps the address of its services.
func Addresses(ns *netns.Handle, addrs ...netip.Prefix) error {
	return ns.Do(func() error { return configure("lo", addrs) })
}

func configure(name string, addrs []netip.Prefix) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return err
	}
	for _, a := range addrs {
		addr := &netlink.Addr{IPNet: ipnet(a)}
		if a.Addr().Is6() {
			addr.Flags = unix.IFA_F_NODAD
		}
		if err := netlink.AddrAdd(link, addr); err != nil {
			return fmt.Errorf("address %s: %w", a, err)
		}
	}
	return nil
}

// Route adds a route to dst via a neighbour, an address on one of the namespace's cables.
func Route(ns *netns.Handle, dst netip.Prefix, via netip.Addr) error {
	err := ns.Do(func() error {
		return netlink.RouteAdd(&netlink.Route{Dst: ipnet(dst), Gw: via.AsSlice()})
	})
	if err != nil {
		return fmt.Errorf("route %s via %s: %w", dst, via, err)
	}
	return nil
}

// Own makes every address of the range local to the namespace, without adding each. Sockets may then bind
// to any of them; for IPv6 this needs the sysctl net.ipv6.ip_nonlocal_bind.
func Own(ns *netns.Handle, ranges ...netip.Prefix) error {
	return ns.Do(func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		for _, r := range ranges {
			route := &netlink.Route{Dst: ipnet(r), LinkIndex: lo.Attrs().Index, Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL}
			if r.Addr().Is4() {
				route.Scope = netlink.SCOPE_HOST
			}
			if err := netlink.RouteAdd(route); err != nil {
				return fmt.Errorf("own %s: %w", r, err)
			}
		}
		return nil
	})
}

// Sysctl sets a variable of the namespace, named with dots: "net.ipv6.ip_nonlocal_bind".
func Sysctl(ns *netns.Handle, name, value string) error {
	return ns.Do(func() error {
		// /proc/sys/net belongs to the namespace of the opening thread.
		return os.WriteFile("/proc/sys/"+strings.ReplaceAll(name, ".", "/"), []byte(value), 0)
	})
}

func ipnet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
