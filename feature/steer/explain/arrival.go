// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"os"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/sockdiag"
	"golang.org/x/sys/unix"
)

// arrival is the incoming interface of a packet, for sockets bound to an interface.
type arrival struct {
	known  bool
	index  uint32
	master uint32 // VRF of the interface; 0: none
	accept bool   // sockets without an interface accept packets of VRFs (net.ipv4.tcp_l3mdev_accept, udp_l3mdev_accept)
}

// interfaces finds the packet's incoming interface.
func (x *explainer) interfaces() (a arrival, err error) {
	if x.p.Interface == "" {
		return a, nil
	}
	err = x.ns.Do(func() error {
		l, err := netlink.LinkByName(x.p.Interface)
		if err != nil {
			return nil //nolint:nilerr // it went, and the answer is as without one
		}
		a.known, a.index = true, uint32(l.Attrs().Index)
		if l.Attrs().MasterIndex == 0 {
			return nil
		}
		if m, err := netlink.LinkByIndex(l.Attrs().MasterIndex); err == nil && m.Type() == "vrf" {
			a.master = uint32(m.Attrs().Index)
		}
		return nil
	})
	a.accept = a.master != 0 && l3mdevAccept(x.ns, x.p.Number())
	return a, err
}

// accepts reports whether a socket's interface admits the packet, like the kernel's udp_sk_bound_dev_eq and
// inet_bound_dev_eq.
func (a arrival) accepts(s sockdiag.Socket) bool {
	if !a.known {
		return true
	}
	if s.Interface == 0 {
		return a.master == 0 || a.accept
	}
	return s.Interface == a.index || a.master != 0 && s.Interface == a.master
}

// acceptKey returns the sysctl that makes sockets without an interface accept packets of VRFs.
func acceptKey(proto uint8) string {
	if proto == unix.IPPROTO_TCP {
		return "tcp_l3mdev_accept"
	}
	return "udp_l3mdev_accept"
}

func l3mdevAccept(ns *netns.Handle, proto uint8) (on bool) {
	_ = ns.Do(func() error {
		b, err := os.ReadFile("/proc/sys/net/ipv4/" + acceptKey(proto))
		on = err == nil && strings.TrimSpace(string(b)) == "1"
		return nil
	})
	return on
}
