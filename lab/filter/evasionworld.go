// SPDX-License-Identifier: Apache-2.0

package filters

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/lab/topo"
)

// The next host is behind the filtered one. These are its addresses, and the segment identifier of the
// filtered host, where it decapsulates (RFC 8986, End.DT6).
var (
	next4 = [4]byte{10, 3, 0, 2}
	next6 = [16]byte{0xfd, 3, 15: 2}
	sid   = [16]byte{0x20, 0x01, 0x0d, 0xb8, 0, 0xd6, 15: 0xd6}
)

const (
	outDevice  = "eth1" // of the filtered host, to the next one
	markerPort = 9999
)

// reply is an answer to the sender: to an address and port, from a port.
type reply struct {
	to       netip.Addr
	at, from uint16
}

// evasionWorld is a sender, the filtered host, and a host behind it. Both hosts answer at all ports of
// asks.
type evasionWorld struct {
	*world
	conns   []syscall.Conn // of the filtered host
	in      int            // a packet socket of the sender
	raw     [2]int         // of the filtered host: IPv4 and IPv6 packets with their headers
	replies map[reply]bool
	marks   uint16
	buf     []byte
}

func (x *experiment) newEvasionWorld() (*evasionWorld, error) {
	w := &evasionWorld{replies: map[reply]bool{}, buf: make([]byte, 4096)}
	var err error
	if w.world, err = newWorld(x.env, "evade", false); err != nil {
		return nil, err
	}
	next, _, err := x.env.Namespace("evade-c")
	if err != nil {
		return nil, err
	}
	if err := w.cable(next); err != nil {
		return nil, err
	}
	for _, ns := range []*netns.Handle{w.host, next} {
		conns, err := answer(ns, x.env.OnClose)
		if err != nil {
			return nil, err
		}
		if ns == w.host {
			w.conns = conns
		}
	}
	if err := w.sockets(); err != nil {
		return nil, err
	}
	x.env.OnClose(func() { unix.Close(w.in); unix.Close(w.raw[0]); unix.Close(w.raw[1]) })
	return w, nil
}

// cable connects the filtered host and the next one, and adds both hosts' routes to the probes' addresses.
func (w *evasionWorld) cable(next *netns.Handle) error {
	prefix := func(a any) netip.Prefix {
		switch a := a.(type) {
		case [4]byte:
			return netip.PrefixFrom(netip.AddrFrom4(a), 24)
		}
		return netip.PrefixFrom(netip.AddrFrom16(a.([16]byte)), 64)
	}
	near4, near6 := next4, next6
	near4[3], near6[15] = 1, 1
	err := errors.Join(topo.Addresses(next),
		topo.Cable(topo.End{NS: w.host, Name: outDevice, Addrs: []netip.Prefix{prefix(near4), prefix(near6)}},
			topo.End{NS: next, Name: device, Addrs: []netip.Prefix{prefix(next4), prefix(next6)}}))
	for _, s := range []string{"net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding"} {
		err = errors.Join(err, topo.Sysctl(w.host, s, "1"))
	}
	for _, ns := range []*netns.Handle{w.host, next} {
		// Always send a cookie: half-open connections of one hook would suppress answers at the next.
		err = errors.Join(err, topo.Sysctl(ns, "net.ipv4.tcp_syncookies", "2"))
	}
	if err != nil {
		return err
	}
	for _, r := range []struct {
		ns  *netns.Handle
		dst string
		via netip.Addr
	}{
		{w.host, "10.77.0.0/16", netip.AddrFrom4(sources4[0])}, {w.host, "2001:db8:77::/48", netip.AddrFrom16(sources6[0])},
		{next, "10.77.0.0/16", netip.AddrFrom4(near4)}, {next, "2001:db8:77::/48", netip.AddrFrom16(near6)},
	} {
		if err := topo.Route(r.ns, netip.MustParsePrefix(r.dst), r.via); err != nil {
			return err
		}
	}
	return w.host.Do(func() error {
		e := &netlink.SEG6LocalEncap{Action: nl.SEG6_LOCAL_ACTION_END_DT6, Table: unix.RT_TABLE_MAIN}
		e.Flags[nl.SEG6_LOCAL_ACTION], e.Flags[nl.SEG6_LOCAL_TABLE] = true, true
		err := netlink.RouteAdd(&netlink.Route{LinkIndex: w.ifindex, Dst: &net.IPNet{IP: sid[:], Mask: net.CIDRMask(128, 128)}, Encap: e})
		if err != nil && !errors.Is(err, unix.EOPNOTSUPP) { // without it the tunnel brings no answer
			return fmt.Errorf("route a segment: %w", err)
		}
		return nil
	})
}

// answer opens the ports of a host: TCP ones, answered by the kernel, and UDP ones with an echo.
func answer(ns *netns.Handle, onClose func(func())) ([]syscall.Conn, error) {
	var conns []syscall.Conn
	err := ns.Do(func() error {
		for _, a := range append(asks, ask{proto: protoTCP, port: 8080}, ask{proto: protoUDP, port: markerPort}) {
			at := netip.AddrPortFrom(netip.IPv6Unspecified(), a.port)
			if a.proto == protoTCP {
				var lc net.ListenConfig
				lc.SetMultipathTCP(false) // MPTCP sockets accept no filter
				l, err := lc.Listen(context.Background(), "tcp", at.String())
				if err != nil {
					return err
				}
				onClose(func() { l.Close() })
				conns = append(conns, l.(*net.TCPListener))
				continue
			}
			c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
			if err != nil {
				return err
			}
			onClose(func() { c.Close() })
			conns = append(conns, c)
			go echo(c)
		}
		return nil
	})
	return conns, err
}

func echo(c *net.UDPConn) {
	b := make([]byte, 2048)
	for {
		n, from, err := c.ReadFromUDPAddrPort(b)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil {
			_, _ = c.WriteToUDPAddrPort(b[:n], from)
		}
	}
}

// sockets opens the sender's receiving socket, and the raw sockets of the filtered host for its own probes.
func (w *evasionWorld) sockets() error {
	err := w.sender.Do(func() error {
		proto := int(binary.NativeEndian.Uint16(be.AppendUint16(nil, unix.ETH_P_ALL)))
		var err error
		if w.in, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, proto); err != nil {
			return err
		}
		return errors.Join(unix.SetsockoptInt(w.in, unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING, 1),
			unix.SetsockoptInt(w.in, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 16<<20))
	})
	return errors.Join(err, w.host.Do(func() error {
		for i, family := range []int{unix.AF_INET, unix.AF_INET6} {
			var err error
			if w.raw[i], err = unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW); err != nil {
				return err
			}
		}
		return unix.SetsockoptInt(w.raw[1], unix.IPPROTO_IPV6, unix.IPV6_HDRINCL, 1)
	}))
}

// frame returns an IP packet on the sender's cable, behind tags.
func (w *evasionWorld) frame(tags []uint16, ip []byte) []byte {
	b := append([]byte(nil), w.macs...)
	for _, t := range tags {
		b = be.AppendUint16(be.AppendUint16(b, 0x8100), t)
	}
	kind := uint16(0x0800)
	if ip[0]>>4 == 6 {
		kind = 0x86dd
	}
	return append(be.AppendUint16(b, kind), ip...)
}

// hear records all answers received so far.
func (w *evasionWorld) hear() error {
	for {
		n, _, err := unix.Recvfrom(w.in, w.buf, unix.MSG_DONTWAIT)
		if errors.Is(err, unix.EAGAIN) {
			return nil
		} else if err != nil {
			return fmt.Errorf("read answers: %w", err)
		}
		if r, ok := readReply(w.buf[:n]); ok {
			w.replies[r] = true
		}
	}
}

// readReply parses a frame with an answer: a SYN of the other side, or a datagram.
func readReply(b []byte) (r reply, ok bool) {
	if len(b) < 14+20+20 {
		return r, false
	}
	proto, body := byte(0), b
	switch be.Uint16(b[12:]) {
	case 0x0800:
		proto, body = b[23], b[14+int(b[14]&15)*4:]
		r.to = netip.AddrFrom4([4]byte(b[30:34]))
	case 0x86dd:
		if len(b) < 14+40+20 {
			return r, false
		}
		proto, body = b[20], b[54:]
		r.to = netip.AddrFrom16([16]byte(b[38:54]))
	}
	if proto != protoUDP && (proto != protoTCP || len(body) < 20 || body[13]&0x12 != 0x12) || len(body) < 8 {
		return r, false
	}
	r.from, r.at = be.Uint16(body), be.Uint16(body[2:])
	return r, true
}

// mark sends a datagram to a host and waits for the answer. All earlier packets are processed then.
func (w *evasionWorld) mark(dst []byte, port uint16) error {
	w.marks++
	p := &disguise{ask: ask{proto: protoUDP, port: port}, src: []byte{10, 77, 255, 1}, dst: dst, sport: 1024 + w.marks}
	p.build(&shape{})
	want := reply{netip.AddrFrom4([4]byte(p.src)), p.sport, port}
	delete(w.replies, want)
	frame := &packet{frame: w.frame(nil, p.v4("", 0, protoUDP, p.segment))}
	for begin := time.Now(); ; {
		if err := w.send(frame); err != nil {
			return err
		}
		for sent := time.Now(); time.Since(sent) < 100*time.Millisecond; {
			if err := w.hear(); err != nil || w.replies[want] {
				return err
			}
			if _, err := unix.Poll([]unix.PollFd{{Fd: int32(w.in), Events: unix.POLLIN}}, 10); err != nil && !errors.Is(err, unix.EINTR) {
				return err
			}
		}
		if time.Since(begin) > 10*time.Second {
			return fmt.Errorf("no answer from port %d of %v for 10 s", port, dst)
		}
	}
}

// pinned runs f on one CPU, so its sent packets keep their order.
func pinned(f func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var all, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		return err
	}
	cpu := 0
	for !all.IsSet(cpu) {
		cpu++
	}
	one.Set(cpu)
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		return err
	}
	defer unix.SchedSetaffinity(0, &all)
	return f()
}
