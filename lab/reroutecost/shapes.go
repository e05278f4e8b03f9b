// SPDX-License-Identifier: Apache-2.0

package reroutecost

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/reroute/protect"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/lab/topo"
)

// shape is a form of rerouting.
type shape struct {
	name     string
	inline   bool
	segments []string
	fast     bool // at the input
}

var shapes = []shape{
	{name: "one segment", segments: []string{sidOut}},
	{name: "two segments", segments: []string{sidVia, sidOut}},
	{name: "five segments", segments: []string{sidVia, "fc00:3::2", "fc00:3::3", "fc00:3::4", sidOut}},
	{name: "inline, one segment", inline: true, segments: []string{sidVia}},
	{name: "inline, four segments", inline: true, segments: []string{sidVia, "fc00:3::2", "fc00:3::3", "fc00:3::4"}},
	{name: "two segments, at the input", segments: []string{sidVia, sidOut}, fast: true},
	{name: "one segment, at the input", segments: []string{sidOut}, fast: true},
	{name: "five segments, at the input", segments: []string{sidVia, "fc00:3::2", "fc00:3::3", "fc00:3::4", sidOut}, fast: true},
}

// catcher is a router with one namespace for all neighbours. It sends frames from there unchanged, and
// receives the rerouted ones there.
type catcher struct {
	x           *experiment
	router, far *netns.Handle
	name        string
	root        *kernel.Root
	out, in     int // packet sockets: to the router, and from its backup
	mac         [6]byte
}

// shapes counts malformed packets.
func (x *experiment) shapes(ctx context.Context) error {
	x.say("%d packets of each of %d shapes, rerouted, caught and compared", x.packets, len(shapes))
	c, err := x.newCatcher()
	if err != nil {
		return err
	}
	wrong, checked := 0, 0
	for _, s := range shapes {
		stop, err := c.prepare(ctx, s)
		if err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
		for i := range x.packets {
			for _, p := range c.packets(i) {
				err := c.exchange(s, p)
				if checked++; err != nil {
					wrong++
					x.result.Note("malformed: %s, %s of %d bytes: %v", s.name, p.what, len(p.ip), err)
				}
			}
		}
		fast := c.fast(ctx)
		stop()
		if err := errors.Join(ctx.Err(), c.wasFast(s, fast)); err != nil {
			return err
		}
	}
	x.result.Set("malformed", float64(wrong))
	x.result.Set("packets_compared", float64(checked))
	return nil
}

func (x *experiment) newCatcher() (*catcher, error) {
	c := &catcher{x: x, root: kernel.OpenRoot(x.env.Root)}
	var err error
	if c.router, c.name, err = x.env.Namespace("shape"); err != nil {
		return nil, err
	}
	if c.far, _, err = x.env.Namespace("around"); err != nil {
		return nil, err
	}
	if err := errors.Join(routerSysctls(c.router), topo.Sysctl(c.router, "net.ipv4.ip_forward", "1"), topo.Sysctl(c.far, "net.ipv6.conf.default.accept_dad", "0"),
		topo.Sysctl(c.router, "net.ipv4.conf.all.rp_filter", "0"), topo.Sysctl(c.router, "net.ipv4.conf.default.rp_filter", "0")); err != nil {
		return nil, err
	}
	for i, dev := range []string{"in", "main", "back"} {
		near := topo.End{NS: c.router, Name: dev, Addrs: []netip.Prefix{netip.PrefixFrom(linkAddr(i, 1), 64)}}
		far := topo.End{NS: c.far, Name: "f" + dev, Addrs: []netip.Prefix{netip.PrefixFrom(linkAddr(i, 2), 64)}}
		if err := topo.Cable(near, far); err != nil {
			return nil, err
		}
	}
	err = errors.Join(topo.Addresses(c.router, netip.MustParsePrefix("fc00:1::1/128")),
		topo.Route(c.router, netip.MustParsePrefix("fd00:d::/64"), linkAddr(1, 2)), topo.Route(c.router, netip.MustParsePrefix("fc00::/16"), linkAddr(2, 2)),
		c.router.Do(func() error {
			return netlink.RouteAdd(&netlink.Route{Dst: ipnet("10.4.0.0/24"), Via: &netlink.Via{AddrFamily: unix.AF_INET6, Addr: linkAddr(1, 2).AsSlice()}, LinkIndex: index("main")})
		}))
	if err != nil {
		return nil, err
	}
	mac, err := hardware(c.router, "in")
	if err != nil {
		return nil, err
	}
	c.mac = [6]byte(mac)
	return c, c.far.Do(func() (err error) {
		if c.out, err = packetSocket("fin"); err == nil {
			c.in, err = packetSocket("fback")
		}
		if err == nil {
			x.env.OnClose(func() { unix.Close(c.out); unix.Close(c.in) })
		}
		return err
	})
}

// prepare protects the router's link in a shape and drains it.
func (c *catcher) prepare(ctx context.Context, s shape) (stop func(), err error) {
	r := protect.Repair{Source: netip.MustParseAddr("fc00:1::1")}
	if s.inline {
		r.Mode = protect.Inline
		r.Segments4 = addresses(sidVia, sidOut)
	}
	r.Segments = addresses(s.segments...)
	if !s.inline {
		r.Segments4 = r.Segments // only headers are checked; no router ends the list
	}
	p := protect.Path{Name: "shape", Netns: c.name, Device: "main", Repairs: []protect.Repair{r}}
	if err := apply(ctx, c.x.env, c.root, protect.Config{Paths: []protect.Path{p}}); err != nil {
		return nil, err
	}
	if err := locked(ctx, c.root, func(l *kernel.WriteLock) error { return protect.Drain(l, "shape") }); err != nil {
		return nil, err
	}
	if !s.fast {
		return func() {}, nil
	}
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = protect.Run(ctx, c.root, logger{c.x})
	}()
	stop = func() { cancel(); <-ended }
	for end := time.Now().Add(60 * time.Second); c.fast(ctx) == 0; {
		if err := c.exchange(s, c.packets(0)[0]); err != nil && !errors.Is(err, errSilent) {
			stop()
			return nil, err
		}
		if time.Now().After(end) {
			stop()
			return nil, errors.New("no packet was rerouted at its input within 60 s")
		}
	}
	return stop, nil
}

// fast returns the number of packets rerouted at their input.
func (c *catcher) fast(ctx context.Context) uint64 {
	st, err := protect.ReadState(ctx, c.root)
	if err != nil || len(st.Paths) == 0 {
		return 0
	}
	return st.Paths[0].Counts.Fast
}

func (c *catcher) wasFast(s shape, n uint64) error {
	if s.fast && n < uint64(c.x.packets) {
		return fmt.Errorf("%s: only %d packets were rerouted at the input", s.name, n)
	}
	return nil
}

func addresses(text ...string) (out []netip.Addr) {
	for _, t := range text {
		out = append(out, netip.MustParseAddr(t))
	}
	return out
}

// errSilent reports a packet without arrival.
var errSilent = errors.New("no packet within ten seconds")

// exchange sends a packet and checks the result.
func (c *catcher) exchange(s shape, p sample) error {
	ethertype := uint16(unix.ETH_P_IPV6)
	if p.ip[0]>>4 == 4 {
		ethertype = unix.ETH_P_IP
	}
	frame := binary.BigEndian.AppendUint16(append(append([]byte{}, c.mac[:]...), 2, 0, 0, 0, 0, 9), ethertype)
	if _, err := unix.Write(c.out, append(frame, p.ip...)); err != nil {
		return err
	}
	buf := make([]byte, 4096)
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); {
		n, err := unix.Read(c.in, buf) // has its own timeout
		if err != nil {
			continue
		}
		got := buf[:n]
		if n < 14 || !bytes.Contains(got, p.token) {
			continue // sent by the router itself
		}
		if t := binary.BigEndian.Uint16(got[12:]); t != unix.ETH_P_IPV6 {
			return fmt.Errorf("its Ethernet type is %#x", t)
		}
		return s.check(got[14:], p)
	}
	return errSilent
}

// packetSocket opens a packet socket on a device of the thread's namespace, to receive and to send.
func packetSocket(dev string) (int, error) {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	const all = unix.ETH_P_ALL>>8 | unix.ETH_P_ALL&0xff<<8 // network byte order
	err = errors.Join(unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: index(dev)}),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 50_000}))
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// index returns the index of a device of the thread's namespace; 0: it does not exist.
func index(dev string) int {
	l, err := netlink.LinkByName(dev)
	if err != nil {
		return 0
	}
	return l.Attrs().Index
}
