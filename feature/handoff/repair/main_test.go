// SPDX-License-Identifier: Apache-2.0

package repair

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// world is a client, a router that plays the front end, and two servers that have the
// service's addresses in turn. The router holds packets in a TUN device while a session
// moves, and lets them go to its new server afterwards.
type world struct {
	t       testing.TB
	client  *netns.Handle
	router  *netns.Handle
	servers [2]*netns.Handle
	tun     *os.File
	owner   int
	vip4    netip.Addr
	vip6    netip.Addr
	// drop has the router throw away what it holds: the move loses it.
	drop bool
}

const (
	tunName = "hold"
	port    = 9000
)

var worlds atomic.Int32

func newWorld(t testing.TB) *world {
	t.Helper()
	nstest.NeedRoot(t)
	n := worlds.Add(1)
	w := &world{t: t, vip4: netip.MustParseAddr("10.9.0.1"), vip6: netip.MustParseAddr("fd09::1")}
	ns := func(name string) *netns.Handle {
		name = fmt.Sprintf("repair%d-%s", n, name)
		h, err := netns.Create(name)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { h.Close(); _ = netns.Delete(name) })
		w.do(h, netns.LoopbackUp)
		return h
	}
	w.client, w.router = ns("client"), ns("router")
	w.servers = [2]*netns.Handle{ns("server0"), ns("server1")}
	w.do(w.router, func() error { return w.makeRouter() })
	for i, h := range []*netns.Handle{w.client, w.servers[0], w.servers[1]} {
		w.cable(h, i)
	}
	w.own(0)
	w.route(0)
	return w
}

func (w *world) do(h *netns.Handle, f func() error) {
	w.t.Helper()
	if err := h.Do(f); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) makeRouter() error {
	for _, f := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
		if err := os.WriteFile("/proc/sys/net/"+f, []byte("1"), 0); err != nil {
			return err
		}
	}
	// Without packet information it takes and gives bare packets.
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	w.tun = os.NewFile(uintptr(fd), tunName)
	w.t.Cleanup(func() { w.tun.Close() })
	req, err := unix.NewIfreq(tunName)
	if err != nil {
		return err
	}
	req.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, req); err != nil {
		return err
	}
	l, err := netlink.LinkByName(tunName)
	if err != nil {
		return err
	}
	return errors.Join(netlink.LinkSetTxQLen(l, 20000), netlink.LinkSetUp(l))
}

// side gives the addresses of cable i at the router (1) or at the other end (2).
func side(i, end int) []netip.Prefix {
	return []netip.Prefix{netip.MustParsePrefix(fmt.Sprintf("10.1.%d.%d/24", i, end)), netip.MustParsePrefix(fmt.Sprintf("fd01:0:0:%d::%d/64", i, end))}
}

func (w *world) cable(h *netns.Handle, i int) {
	w.t.Helper()
	name := fmt.Sprintf("r%d", i)
	nstest.Cable(w.t, w.router, name, h, "eth0")
	nstest.Address(w.t, w.router, name, side(i, 1)...)
	nstest.Address(w.t, h, "eth0", side(i, 2)...)
	w.do(h, func() error {
		for _, via := range side(i, 1) {
			if err := netlink.RouteAdd(&netlink.Route{Gw: via.Addr().AsSlice(), Dst: anywhere(via.Addr())}); err != nil {
				return err
			}
		}
		return nil
	})
}

func anywhere(a netip.Addr) *net.IPNet {
	return &net.IPNet{IP: make(net.IP, a.BitLen()/8), Mask: net.CIDRMask(0, a.BitLen())}
}

func host(a netip.Addr) *net.IPNet {
	return &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}
}

// own gives the service's addresses to a server, disown takes them: from then on it is
// deaf to the service's packets, and answers to none.
func (w *world) own(i int) {
	w.t.Helper()
	w.do(w.servers[i], func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return errors.Join(netlink.AddrAdd(lo, &netlink.Addr{IPNet: host(w.vip4)}),
			netlink.AddrAdd(lo, &netlink.Addr{IPNet: host(w.vip6), Flags: unix.IFA_F_NODAD}))
	})
	w.owner = i
}

func (w *world) disown(i int) {
	w.t.Helper()
	w.do(w.servers[i], func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return errors.Join(netlink.AddrDel(lo, &netlink.Addr{IPNet: host(w.vip4)}), netlink.AddrDel(lo, &netlink.Addr{IPNet: host(w.vip6)}))
	})
}

// route sends the service's packets to a server; hold keeps them at the router.
func (w *world) route(i int) {
	w.t.Helper()
	via := side(i+1, 2)
	w.do(w.router, func() error {
		return errors.Join(netlink.RouteReplace(&netlink.Route{Dst: host(w.vip4), Gw: via[0].Addr().AsSlice()}),
			netlink.RouteReplace(&netlink.Route{Dst: host(w.vip6), Gw: via[1].Addr().AsSlice()}))
	})
}

func (w *world) hold() {
	w.t.Helper()
	w.do(w.router, func() error {
		l, err := netlink.LinkByName(tunName)
		if err != nil {
			return err
		}
		return errors.Join(netlink.RouteReplace(&netlink.Route{Dst: host(w.vip4), LinkIndex: l.Attrs().Index}),
			netlink.RouteReplace(&netlink.Route{Dst: host(w.vip6), LinkIndex: l.Attrs().Index}))
	})
}

// release lets go of what was held, after the route leads to the new server.
func (w *world) release() (n int) {
	w.t.Helper()
	b := make([]byte, 1<<16)
	for {
		m, err := unix.Read(int(w.tun.Fd()), b)
		if err != nil {
			return n
		}
		n++
		if w.drop {
			continue
		}
		if _, err := unix.Write(int(w.tun.Fd()), b[:m]); err != nil {
			w.t.Errorf("a packet that was held: %v", err)
		}
	}
}

// move takes a session to the other server, over the wire's form.
func (w *world) move(from dumper) *Conn {
	w.t.Helper()
	return w.moveState(from, nil)
}

type dumper interface {
	Dump(DumpOptions) (*State, error)
	Close() error
}

// fresh is a session that never moved.
type fresh struct{ *net.TCPConn }

func (f fresh) Dump(o DumpOptions) (*State, error) { return DumpConn(f.TCPConn, o) }

func (w *world) moveState(from dumper, look func(*State)) *Conn {
	w.t.Helper()
	s := w.dump(from)
	if look != nil {
		look(s)
	}
	return w.restore(s)
}

func (w *world) dump(from dumper) *State {
	w.t.Helper()
	s, err := from.Dump(DumpOptions{Stop: func(Flow) (func(), error) {
		w.hold()
		w.disown(w.owner)
		return func() { w.own(w.owner); w.route(w.owner); w.release() }, nil
	}})
	if err != nil {
		w.t.Fatal(err)
	}
	if err := from.Close(); err != nil {
		w.t.Fatal(err)
	}
	b, err := s.MarshalBinary()
	if err != nil {
		w.t.Fatal(err)
	}
	if s, err = Parse(b); err != nil {
		w.t.Fatal(err)
	}
	return s
}

func (w *world) restore(s *State) (c *Conn) {
	w.t.Helper()
	w.own(1 - w.owner)
	w.do(w.servers[w.owner], func() (err error) {
		c, err = Restore(s, RestoreOptions{Probe: w.drop})
		return err
	})
	w.t.Cleanup(func() { c.Close() })
	w.route(w.owner)
	w.release()
	return c
}

// pair connects the client with the service's present owner. The sockets are shaped
// before they connect or listen.
func (w *world) pair(network string, shapeClient, shapeServer func(fd int) error) (client, server *net.TCPConn) {
	w.t.Helper()
	addr, bind := w.vip4, ""
	if network == "tcp6" {
		addr = w.vip6
	} else if network == "tcp" {
		bind = "::" // IPv4 on a socket of both
	}
	lc := net.ListenConfig{Control: shape(shapeServer)}
	lc.SetMultipathTCP(false)
	var ln net.Listener
	w.do(w.servers[w.owner], func() (err error) {
		listen := net.JoinHostPort(addr.String(), fmt.Sprint(port))
		if bind != "" {
			listen = net.JoinHostPort(bind, fmt.Sprint(port))
		}
		ln, err = lc.Listen(w.t.Context(), network, listen)
		return err
	})
	defer ln.Close()
	d := net.Dialer{Timeout: 5 * time.Second, Control: shape(shapeClient)}
	w.do(w.client, func() error {
		c, err := d.Dial("tcp", netip.AddrPortFrom(addr, port).String())
		if err == nil {
			client = c.(*net.TCPConn)
		}
		return err
	})
	c, err := ln.Accept()
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { client.Close(); c.Close() })
	return client, c.(*net.TCPConn)
}

// pattern is a stream of bytes that never repeats in any window that TCP could shift by.
func pattern(b []byte, offset uint64) {
	for i := range b {
		x := (offset + uint64(i)) * 0x9e3779b97f4a7c15
		b[i] = byte(x >> 56)
	}
}

// verify tells whether b is the pattern from offset on.
func verify(b []byte, offset uint64) error {
	want := make([]byte, len(b))
	pattern(want, offset)
	if bytes.Equal(b, want) {
		return nil
	}
	for i := range b {
		if b[i] != want[i] {
			return fmt.Errorf("byte %d is %#x, want %#x", offset+uint64(i), b[i], want[i])
		}
	}
	return nil
}

// shape is Control for a socket that is being made.
func shape(f func(fd int) error) func(string, string, rawConn) error {
	return func(_, _ string, c rawConn) (err error) {
		if f == nil {
			return nil
		}
		err2 := c.Control(func(fd uintptr) { err = f(int(fd)) })
		return errors.Join(err, err2)
	}
}

// together runs functions and waits for them.
func together(fs ...func()) {
	var wg sync.WaitGroup
	for _, f := range fs {
		wg.Go(f)
	}
	wg.Wait()
}
