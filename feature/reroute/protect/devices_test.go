// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"errors"
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// canMake reports whether the kernel supports a kind of device.
func canMake(l netlink.Link) error {
	err := netns.InNew(func() error {
		err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "below"}})
		if err == nil {
			below, _ := netlink.LinkByName("below")
			if v, ok := l.(*netlink.Vlan); ok {
				v.ParentIndex = below.Attrs().Index
			}
			err = netlink.LinkAdd(l)
		}
		return err
	})
	if errors.Is(err, unix.EOPNOTSUPP) {
		return err
	}
	return nil
}

func needDevice(t *testing.T, l netlink.Link) {
	t.Helper()
	n := kernel.Need{Name: l.Type() + " devices", Since: "4.3", Probe: func() error { return canMake(l) }}
	if err := n.Check(); err != nil {
		t.Skip("need: kernel", err)
	}
}

// The protected link and the backup can be VLANs.
func TestVLAN(t *testing.T) {
	w := newWorld(t)
	needDevice(t, &netlink.Vlan{LinkAttrs: netlink.LinkAttrs{Name: "v"}, VlanId: 7})
	for _, x := range []struct {
		ns        *netns.Handle
		dev, addr string
		id        string
	}{{w.r1, "main", "fd00:77::1/64", "7"}, {w.r2, "main", "fd00:77::2/64", "7"}, {w.r1, "back", "fd00:78::1/64", "8"}, {w.r3, "r1", "fd00:78::3/64", "8"}} {
		w.ip(x.ns, "link add link "+x.dev+" name v"+x.id+" type vlan id "+x.id, "link set v"+x.id+" up", "addr add "+x.addr+" dev v"+x.id)
	}
	w.ip(w.r1, "route replace fd00:d::/64 via fd00:77::2", "route replace fc00:3::/32 via fd00:78::3")
	path := w.path(around())
	path.Device = "v7"
	w.apply(path)
	w.rerouted(w.pair(true))
}

// Either can belong to a VRF: the link in the VRF, the backup elsewhere.
func TestVRF(t *testing.T) {
	w := newWorld(t)
	needDevice(t, &netlink.Vrf{LinkAttrs: netlink.LinkAttrs{Name: "v"}, Table: 7})
	w.ip(w.r1, "link add blue type vrf table 10", "link set blue up", "link set in master blue", "link set main master blue",
		"addr replace fd00:a::1/64 dev in nodad", "addr replace fd00:12::1/64 dev main nodad", "route add fd00:d::/64 via fd00:12::2 vrf blue")
	w.apply(w.path(around()))
	w.rerouted(w.pair(true))
}

// A bridge's own device can be protected too. Every kernel has bridges.
func TestBridge(t *testing.T) {
	w := newWorld(t)
	w.ip(w.r1, "link add br0 type bridge", "link set br0 up", "link set main master br0", "addr flush dev main", "addr add fd00:12::1/64 dev br0 nodad",
		"route replace fd00:d::/64 via fd00:12::2")
	path := w.path(around())
	path.Device = "br0"
	w.apply(path)
	w.rerouted(w.pair(true))
}

// rerouted drains the link and checks that packets go around it.
func (w *world) rerouted(p pair) {
	w.Helper()
	if !p.arrives(100, patience) {
		w.Fatal("nothing arrives while the link is up")
	}
	w.drain(true)
	for _, size := range []int{0, 100, 1380} {
		if !p.arrives(size, patience) {
			w.Errorf("%d bytes do not arrive", size)
		}
	}
	if c := w.state("core").Counts; c.Packets != 3 {
		w.Errorf("%+v", c)
	}
	w.healthy()
}

// Packets of a tunnel from this host are rerouted too: the kernel's tunnel headers are inside the repair's.
func TestTunnelWithin(t *testing.T) {
	w := newWorld(t)
	vxlan := func(ns *netns.Handle, local, remote, addr string) {
		w.in(ns, func() error {
			b, err := exec.Command("ip", "link", "add", "vx0", "type", "vxlan", "id", "5", "local", local, "remote", remote, "dstport", "4789").CombinedOutput()
			if err != nil {
				return errors.New(string(b))
			}
			return nil
		})
		w.ip(ns, "link set vx0 mtu 1300 up", "addr add "+addr+" dev vx0 nodad")
	}
	vxlan(w.r1, "fc00:1::1", addrD, "fd00:99::1/64")
	vxlan(w.d, addrD, "fc00:1::1", "fd00:99::2/64")
	w.apply(w.path(around()))
	q := w.pairOf(w.r1, "fd00:99::1", "fd00:99::2")
	if !q.arrives(100, patience) {
		t.Fatal("the tunnel does not work")
	}
	w.drain(true)
	for _, size := range []int{0, 100, 1200} {
		if !q.arrives(size, patience) {
			t.Errorf("%d bytes do not arrive through the tunnel", size)
		}
	}
	w.ip(w.s, "route add fd00:99::/64 via fd00:a::1")
	if lost := w.streamTo(w.r1, "fd00:99::1", "fd00:99::2", patience); lost != 0 {
		t.Errorf("%d segments were lost in trains through the tunnel", lost)
	}
	c := w.state("core").Counts
	if c.Packets == 0 || c.Odd != 0 || c.Lost != 0 {
		t.Errorf("%+v", c)
	}
}
