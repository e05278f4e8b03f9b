// SPDX-License-Identifier: Apache-2.0

package live

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
)

// Devices that are not a wire's own end: what a session's probes leave by, and what is cut.
func TestDevices(t *testing.T) {
	for _, c := range []struct {
		name   string
		device string                                              // of the sessions
		make   func(under netlink.Link, a netlink.LinkAttrs) error // in each namespace, over the wire's end
		after  func(under netlink.Link) error
	}{
		{"vlan", "w0.7", func(under netlink.Link, a netlink.LinkAttrs) error {
			a.ParentIndex = under.Attrs().Index
			return netlink.LinkAdd(&netlink.Vlan{LinkAttrs: a, VlanId: 7})
		}, nil},
		{"bond", "bond7", func(under netlink.Link, a netlink.LinkAttrs) error {
			b := netlink.NewLinkBond(a)
			b.Mode = netlink.BOND_MODE_ACTIVE_BACKUP
			if err := netlink.LinkAdd(b); err != nil {
				return err
			}
			if err := netlink.LinkSetDown(under); err != nil {
				return err
			}
			return netlink.LinkSetMasterByIndex(under, b.Index)
		}, netlink.LinkSetUp},
		{"macvlan", "mac7", func(under netlink.Link, a netlink.LinkAttrs) error {
			a.ParentIndex = under.Attrs().Index
			return netlink.LinkAdd(&netlink.Macvlan{LinkAttrs: a, Mode: netlink.MACVLAN_MODE_BRIDGE})
		}, nil},
		{"vrf", "w0", func(under netlink.Link, a netlink.LinkAttrs) error {
			a.Name = "red"
			v := &netlink.Vrf{LinkAttrs: a, Table: 77}
			if err := netlink.LinkAdd(v); err != nil {
				return err
			}
			return errors.Join(netlink.LinkSetUp(v), netlink.LinkSetMasterByIndex(under, v.Index))
		}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := newPair(t)
			for i, ns := range []*netns.Handle{p.w.A, p.w.B} {
				overWire(t, ns, func(under netlink.Link) error {
					a := netlink.NewLinkAttrs()
					a.Name = c.device
					if err := c.make(under, a); err != nil {
						return err
					}
					if c.after != nil {
						return c.after(under)
					}
					return nil
				})
				addressOn(t, ns, c.device, []string{"fd79::1/64", "fd79::2/64"}[i])
			}
			a, b := p.sessions(10 * time.Millisecond)
			a.Device, a.Via, a.Source = c.device, netip.MustParseAddr("fd79::2"), netip.MustParseAddr("fd79::1")
			b.Device, b.Via, b.Source = c.device, netip.MustParseAddr("fd79::1"), netip.MustParseAddr("fd79::2")
			p.apply(p.w.NameA, a)
			p.apply(p.w.NameB, b)
			p.within(patience, "up", bothUp)
			cut(t, p.w.B, nstest.WireDevice, true)
			p.within(patience, "down", func(a, b SessionState) bool { return a.Phase == Down && b.Phase == Down })
			cut(t, p.w.B, nstest.WireDevice, false)
			p.within(patience, "up again", bothUp)
		})
	}
}

// overWire makes a device over the wire's end; where the kernel has none of the kind, the test skips.
func overWire(t *testing.T, ns *netns.Handle, f func(under netlink.Link) error) {
	t.Helper()
	var err error
	inside(t, ns, func() error {
		var l netlink.Link
		if l, err = netlink.LinkByName(nstest.WireDevice); err == nil {
			err = f(l)
		}
		return nil
	})
	if errors.Is(err, unix.EOPNOTSUPP) {
		t.Skip("need: kernel with devices of this kind (CONFIG_VLAN_8021Q, CONFIG_BONDING, CONFIG_NET_VRF)")
	} else if err != nil {
		t.Fatal(err)
	}
}
