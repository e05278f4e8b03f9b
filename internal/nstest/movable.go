// SPDX-License-Identifier: Apache-2.0

package nstest

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
)

// Movable is a client, a router in the role of a load balancer, and two servers that own a
// service's addresses in turn. During a move the router keeps the session's packets in a TUN
// device. Afterwards it sends them to the new server.
type Movable struct {
	Client, Router *netns.Handle
	Servers        [2]*netns.Handle
	Owner          int // index of the server with the addresses
	V4, V6         netip.Addr
	// Drop makes the router discard the kept packets, so the move loses them.
	Drop bool
	// Held reads the kept packets (IP, without a header). Packets written to it go to the service.
	// Non-blocking.
	Held *os.File

	t testing.TB
}

// Joint connects the router (a) and the client (b). Their devices get the names and addresses.
type Joint func(router, client *netns.Handle, routerDevice, clientDevice string, routerAddrs, clientAddrs []netip.Prefix)

const heldDevice = "hold"

var movables atomic.Int32

// NewMovable creates one, for a test inside [Main]. Without a joint the client is on a veth pair.
func NewMovable(t testing.TB, joint Joint) *Movable {
	t.Helper()
	NeedRoot(t)
	n := movables.Add(1)
	m := &Movable{t: t, V4: netip.MustParseAddr("10.9.0.1"), V6: netip.MustParseAddr("fd09::1")}
	ns := func(name string) *netns.Handle {
		h := newNetns(t, fmt.Sprintf("movable%d-%s", n, name))
		in(t, h, netns.LoopbackUp)
		return h
	}
	m.Client, m.Router = ns("client"), ns("router")
	m.Servers = [2]*netns.Handle{ns("server0"), ns("server1")}
	in(t, m.Router, m.makeRouter)
	for i, h := range []*netns.Handle{m.Client, m.Servers[0], m.Servers[1]} {
		connect := joint
		if i > 0 || joint == nil {
			connect = cable(t)
		}
		connect(m.Router, h, fmt.Sprintf("r%d", i), "eth0", Side(i, 1), Side(i, 2))
		in(t, h, func() error {
			for _, via := range Side(i, 1) {
				if err := netlink.RouteAdd(&netlink.Route{Gw: via.Addr().AsSlice(), Dst: Anywhere(via.Addr())}); err != nil {
					return err
				}
			}
			return nil
		})
	}
	var ends []end
	for i, h := range []*netns.Handle{m.Client, m.Servers[0], m.Servers[1]} {
		if i == 0 && joint != nil {
			continue // only the joint's author knows how long it takes
		}
		for f, router := range Side(i, 1) {
			host := Side(i, 2)[f]
			ends = append(ends, end{m.Router, router.Addr(), h, host.Addr()}, end{h, host.Addr(), m.Router, router.Addr()})
		}
	}
	waitCarried(t, ends...)
	m.Own(0)
	m.Route(0)
	return m
}

func cable(t testing.TB) Joint {
	return func(router, client *netns.Handle, routerDevice, clientDevice string, routerAddrs, clientAddrs []netip.Prefix) {
		Cable(t, router, routerDevice, client, clientDevice)
		Address(t, router, routerDevice, routerAddrs...)
		Address(t, client, clientDevice, clientAddrs...)
	}
}

func (m *Movable) makeRouter() error {
	for _, f := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
		if err := os.WriteFile("/proc/sys/net/"+f, []byte("1"), 0); err != nil {
			return err
		}
	}
	// Without packet information the device uses bare packets.
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	m.Held = os.NewFile(uintptr(fd), heldDevice)
	m.t.Cleanup(func() { m.Held.Close() })
	req, err := unix.NewIfreq(heldDevice)
	if err != nil {
		return err
	}
	req.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, req); err != nil {
		return err
	}
	l, err := netlink.LinkByName(heldDevice)
	if err != nil {
		return err
	}
	return errors.Join(netlink.LinkSetTxQLen(l, 20000), netlink.LinkSetUp(l))
}

// Side returns the addresses of cable i at the router (1) or at the other end (2).
func Side(i, end int) []netip.Prefix {
	return []netip.Prefix{netip.MustParsePrefix(fmt.Sprintf("10.1.%d.%d/24", i, end)), netip.MustParsePrefix(fmt.Sprintf("fd01:0:0:%d::%d/64", i, end))}
}

// Anywhere returns the destination of the default route of a family.
func Anywhere(a netip.Addr) *net.IPNet {
	return &net.IPNet{IP: make(net.IP, a.BitLen()/8), Mask: net.CIDRMask(0, a.BitLen())}
}

func hostNet(a netip.Addr) *net.IPNet {
	return &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}
}

// Own adds the service's addresses to a server.
func (m *Movable) Own(i int) {
	m.t.Helper()
	in(m.t, m.Servers[i], func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return errors.Join(netlink.AddrAdd(lo, &netlink.Addr{IPNet: hostNet(m.V4)}),
			netlink.AddrAdd(lo, &netlink.Addr{IPNet: hostNet(m.V6), Flags: unix.IFA_F_NODAD}))
	})
	m.Owner = i
}

// Disown removes them. The server then ignores the service's packets.
func (m *Movable) Disown(i int) {
	m.t.Helper()
	in(m.t, m.Servers[i], func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return errors.Join(netlink.AddrDel(lo, &netlink.Addr{IPNet: hostNet(m.V4)}), netlink.AddrDel(lo, &netlink.Addr{IPNet: hostNet(m.V6)}))
	})
}

// Route sends the service's packets to a server.
func (m *Movable) Route(i int) {
	m.t.Helper()
	via := Side(i+1, 2)
	in(m.t, m.Router, func() error {
		return errors.Join(netlink.RouteReplace(&netlink.Route{Dst: hostNet(m.V4), Gw: via[0].Addr().AsSlice()}),
			netlink.RouteReplace(&netlink.Route{Dst: hostNet(m.V6), Gw: via[1].Addr().AsSlice()}))
	})
}

// Hold keeps the service's packets at the router.
func (m *Movable) Hold() {
	m.t.Helper()
	in(m.t, m.Router, func() error {
		l, err := netlink.LinkByName(heldDevice)
		if err != nil {
			return err
		}
		return errors.Join(netlink.RouteReplace(&netlink.Route{Dst: hostNet(m.V4), LinkIndex: l.Attrs().Index}),
			netlink.RouteReplace(&netlink.Route{Dst: hostNet(m.V6), LinkIndex: l.Attrs().Index}))
	})
}

// Release sends the kept packets, after the route leads to the new server. It returns their number.
func (m *Movable) Release() (packets int) {
	m.t.Helper()
	b := make([]byte, 1<<16)
	for ; ; packets++ {
		n, err := unix.Read(int(m.Held.Fd()), b)
		if err != nil {
			return packets
		}
		if m.Drop {
			continue
		}
		if _, err := unix.Write(int(m.Held.Fd()), b[:n]); err != nil {
			m.t.Errorf("send a kept packet: %v", err)
		}
	}
}

// Counter returns a TCP counter of a namespace, by its name in /proc/net/snmp.
func (m *Movable) Counter(h *netns.Handle, name string) (v int) {
	m.t.Helper()
	in(m.t, h, func() error {
		b, err := os.ReadFile("/proc/thread-self/net/snmp")
		if err != nil {
			return err
		}
		var heads []string
		for line := range strings.Lines(string(b)) {
			f := strings.Fields(line)
			if f[0] != "Tcp:" {
				continue
			}
			if heads == nil {
				heads = f
				continue
			}
			for i := range f {
				if heads[i] == name {
					v, err = strconv.Atoi(f[i])
				}
			}
		}
		return err
	})
	return v
}

// WantNoResets fails the test if a host has sent or received a reset.
func (m *Movable) WantNoResets() {
	m.t.Helper()
	for i, h := range []*netns.Handle{m.Client, m.Servers[0], m.Servers[1]} {
		if n := m.Counter(h, "OutRsts"); n != 0 {
			m.t.Errorf("%d resets sent by host %d", n, i)
		}
	}
	if n := m.Counter(m.Client, "EstabResets"); n != 0 {
		m.t.Errorf("%d resets at the client", n)
	}
}
