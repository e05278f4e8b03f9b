// SPDX-License-Identifier: Apache-2.0

// Package tunneltest creates a backend's end of a tunnel, like the commands in package tunnel.
package tunneltest

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/feature/handoff/tunnel"
)

// These are the load balancer's addresses inside the tunnel.
var (
	gateway4 = netip.MustParseAddr("169.254.85.1")
	gateway6 = netip.MustParseAddr("fe80::7765:6972")
)

// End is a backend's end of a tunnel.
type End struct {
	Name     string // of the device; default [tunnel.Device]
	Local    netip.Addr
	LB       netip.Addr
	MTU      int          // inside the tunnel
	Services []netip.Addr // their answers return through the tunnel
}

// NewBackend creates a backend's end in the network namespace of the calling thread. It keeps
// existing parts.
func NewBackend(e End) error {
	if e.Name == "" {
		e.Name = tunnel.Device
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.HardwareAddr, attrs.MTU = e.Name, tunnel.BackendMAC, e.MTU
	err := netlink.LinkAdd(&netlink.Vxlan{LinkAttrs: attrs, VxlanId: tunnel.VNI, Port: tunnel.Port, PortLow: tunnel.PortLow, PortHigh: tunnel.PortHigh, SrcAddr: e.Local.AsSlice(), Group: e.LB.AsSlice(), UDP6ZeroCSumRx: true})
	if err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("device %s: %w", e.Name, err)
	}
	l, err := netlink.LinkByName(e.Name)
	if err != nil {
		return err
	}
	if err := errors.Join(netlink.LinkSetMTU(l, e.MTU), netlink.LinkSetUp(l)); err != nil {
		return fmt.Errorf("device %s: %w", e.Name, err)
	}
	for _, s := range e.Services {
		if err := answers(l, s); err != nil {
			return fmt.Errorf("the way back from %s: %w", s, err)
		}
	}
	return nil
}

// answers routes a service's packets to the load balancer.
func answers(l netlink.Link, service netip.Addr) error {
	gateway, family, bits := gateway4, netlink.FAMILY_V4, 32
	if service.Is6() {
		gateway, family, bits = gateway6, netlink.FAMILY_V6, 128
	}
	err := netlink.NeighSet(&netlink.Neigh{LinkIndex: l.Attrs().Index, IP: gateway.AsSlice(), HardwareAddr: tunnel.LBMAC, State: netlink.NUD_PERMANENT})
	if err != nil {
		return fmt.Errorf("neighbour %s: %w", gateway, err)
	}
	all := &net.IPNet{IP: make(net.IP, bits/8), Mask: net.CIDRMask(0, bits)}
	err = netlink.RouteReplace(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: all, Gw: gateway.AsSlice(), Table: tunnel.VNI, Flags: int(netlink.FLAG_ONLINK)})
	if err != nil {
		return fmt.Errorf("route: %w", err)
	}
	r := netlink.NewRule()
	r.Family, r.Table, r.Priority = family, tunnel.VNI, tunnel.VNI
	r.Src = &net.IPNet{IP: service.AsSlice(), Mask: net.CIDRMask(bits, bits)}
	if err := netlink.RuleAdd(r); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("rule: %w", err)
	}
	return nil
}
