// SPDX-License-Identifier: Apache-2.0

package reroutecost

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/lab/topo"
)

// chain is a triangle of routers with a host on either side: s – r1 – r2 – d, and r1 – r3 – r2. The link
// from r1 to r2, "main" at r1, is protected, and "back" connects r3.
type chain struct {
	ns    map[string]*netns.Handle
	names map[string]string
}

// Hosts of the chain.
const (
	hostS = "fd00:a::2"
	hostD = "fd00:d::2"
)

func (x *experiment) newChain() (*chain, error) {
	c := &chain{map[string]*netns.Handle{}, map[string]string{}}
	for _, name := range []string{"s", "r1", "r2", "r3", "d"} {
		h, full, err := x.env.Namespace("c" + name)
		if err != nil {
			return nil, err
		}
		c.ns[name], c.names[name] = h, full
		if err := errors.Join(routerSysctls(h), topo.Sysctl(h, "net.ipv4.ip_forward", "1")); err != nil {
			return nil, err
		}
	}
	for _, l := range [][6]string{{"s", "out", "fd00:a::2/64", "r1", "in", "fd00:a::1/64"}, {"r1", "main", "fd00:12::1/64", "r2", "main", "fd00:12::2/64"},
		{"r1", "back", "fd00:13::1/64", "r3", "r1", "fd00:13::3/64"}, {"r3", "r2", "fd00:32::3/64", "r2", "back", "fd00:32::2/64"},
		{"r2", "out", "fd00:d::1/64", "d", "in", "fd00:d::2/64"}} {
		if err := topo.Cable(c.end(l[0], l[1], l[2]), c.end(l[3], l[4], l[5])); err != nil {
			return nil, err
		}
	}
	for _, r := range [][3]string{{"s", "::/0", "fd00:a::1"}, {"d", "::/0", "fd00:d::1"}, {"r1", "fc00:2::/32", "fd00:12::2"}, {"r1", "fc00:3::/32", "fd00:13::3"},
		{"r1", "fd00:d::/64", "fd00:12::2"}, {"r2", "fd00:a::/64", "fd00:32::3"}, {"r3", "fc00:2::/32", "fd00:32::2"}, {"r3", "fd00:d::/64", "fd00:32::2"},
		{"r3", "fd00:a::/64", "fd00:13::1"}} {
		if err := topo.Route(c.ns[r[0]], netip.MustParsePrefix(r[1]), netip.MustParseAddr(r[2])); err != nil {
			return nil, err
		}
	}
	return c, errors.Join(topo.Addresses(c.ns["r1"], netip.MustParsePrefix("fc00:1::1/128")),
		c.segment("r3", "r1", sidVia, nl.SEG6_LOCAL_ACTION_END), c.segment("r2", "back", sidOut, nl.SEG6_LOCAL_ACTION_END_DT6))
}

func (c *chain) end(host, dev, addr string) topo.End {
	return topo.End{NS: c.ns[host], Name: dev, Addrs: []netip.Prefix{netip.MustParsePrefix(addr)}}
}

// segment adds a segment to a router: the kernel's End, or End.DT6 of the main table.
func (c *chain) segment(host, dev, sid string, action int) error {
	return c.ns[host].Do(func() error {
		l, err := netlink.LinkByName(dev)
		if err != nil {
			return err
		}
		e := &netlink.SEG6LocalEncap{Action: action}
		e.Flags[nl.SEG6_LOCAL_ACTION] = true
		if action == nl.SEG6_LOCAL_ACTION_END_DT6 {
			e.Flags[nl.SEG6_LOCAL_TABLE], e.Table = true, unix.RT_TABLE_MAIN
		}
		dst := &net.IPNet{IP: net.ParseIP(sid), Mask: net.CIDRMask(128, 128)}
		if err := netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: dst, Encap: e}); err != nil {
			return fmt.Errorf("segment %s: %w", sid, err)
		}
		return nil
	})
}
