// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/reroute/links"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// hops returns the hop limit of the next datagram.
func (p pair) hops(t testing.TB) int {
	t.Helper()
	c, err := p.to.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	level, name, kind := unix.IPPROTO_IP, unix.IP_RECVTTL, unix.IP_TTL
	if p.v6 {
		level, name, kind = unix.IPPROTO_IPV6, unix.IPV6_RECVHOPLIMIT, unix.IPV6_HOPLIMIT
	}
	_ = c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), level, name, 1) })
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.from.Write([]byte("how far")); err != nil {
		t.Fatal(err)
	}
	_ = p.to.SetReadDeadline(time.Now().Add(patience))
	buf, oob := make([]byte, 100), make([]byte, 200)
	_, n, _, _, err := p.to.ReadMsgUDP(buf, oob)
	if err != nil {
		t.Fatal(err)
	}
	all, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range all {
		if int(m.Header.Level) == level && int(m.Header.Type) == kind {
			return int(m.Data[0])
		}
	}
	t.Fatal("no hop limit came with the datagram")
	return 0
}

// healthy fails if any kernel has received a malformed packet.
func (w *world) healthy() {
	w.Helper()
	for name, ns := range map[string]*netns.Handle{"s": w.s, "r1": w.r1, "r2": w.r2, "r3": w.r3, "d": w.d} {
		w.in(ns, func() error {
			text, err := os.ReadFile("/proc/thread-self/net/snmp6")
			for line := range strings.Lines(string(text)) {
				f := strings.Fields(line)
				if len(f) == 2 && f[1] != "0" && slices.Contains([]string{"Ip6InHdrErrors", "Ip6InTruncatedPkts", "Udp6InCsumErrors", "Icmp6InCsumErrors"}, f[0]) {
					w.Errorf("%s: %s %s", name, f[0], f[1])
				}
			}
			return err
		})
	}
}

// Packets of a drained link go around unchanged, with a forwarded packet's hop limit, and return after undrain.
func TestReroute(t *testing.T) {
	for name, c := range map[string]struct {
		repair       Repair
		hops6, hops4 int // on arrival by this way, from 64
		no4          bool
	}{
		"encap":         {repair: around(), hops6: 62, hops4: 62},
		"encap, one":    {repair: Repair{Segments: addrs(sidDT6), Segments4: addrs(sidDX4), Device: "back", Via: netip.MustParseAddr("fd00:13::3")}, hops6: 62, hops4: 62},
		"encap, four":   {repair: Repair{Segments: addrs(sidEnd, sidEnd, sidEnd, sidDT6), Segments4: addrs(sidEnd, sidEnd, sidEnd, sidDX4)}, hops6: 62, hops4: 62},
		"inline":        {repair: Repair{Mode: Inline, Segments: addrs(sidEnd), Segments4: addrs(sidEnd, sidDX4)}, hops6: 61, hops4: 62},
		"inline, three": {repair: Repair{Mode: Inline, Segments: addrs(sidEnd, sidEnd, sidEnd), Segments4: addrs(sidEnd, sidDX4)}, hops6: 61, hops4: 62},
		"neighbour":     {repair: Repair{Device: "back", Via: netip.MustParseAddr("fd00:13::3")}, hops6: 61, hops4: 61},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.apply(w.path(c.repair))
			local6, local4 := w.pairOf(w.r1, "fc00:1::1", addrD), w.pairOf(w.r1, "10.1.0.1", addrD4)
			w.ip(w.r2, "route add 10.1.0.1/32 via inet6 fd00:32::3")
			pairs := []pair{w.pair(true), w.pair(false), local6, local4}
			check := func(when string, rerouted int) {
				t.Helper()
				before := w.state("core").Counts.Packets
				for _, p := range pairs {
					for _, size := range []int{0, 1, 100, 1300} {
						if !p.arrives(size, patience) {
							t.Errorf("%s: %d bytes from %s do not arrive whole", when, size, p.from.LocalAddr())
						}
					}
				}
				if got := int(w.state("core").Counts.Packets - before); got != rerouted {
					t.Errorf("%s: %d packets were rerouted, want %d", when, got, rerouted)
				}
			}
			check("up", 0)
			for range 2 {
				w.drain(true)
				check("drained", 16)
				if got := pairs[0].hops(t); got != c.hops6 {
					t.Errorf("IPv6 hop limit %d, want %d", got, c.hops6)
				}
				if got := pairs[1].hops(t); got != c.hops4 {
					t.Errorf("IPv4 TTL %d, want %d", got, c.hops4)
				}
				w.drain(false)
				check("back", 0)
			}
			w.healthy()
		})
	}
}

// TestNoWayForIPv4 drains a link with repairs for IPv6 only. IPv4 packets stay on the working link and are counted.
// The plan warns if IPv4 routes lead over the link.
func TestNoWayForIPv4(t *testing.T) {
	for name, r := range map[string]Repair{
		"encap":  {Segments: addrs(sidEnd, sidDT6)},
		"inline": {Mode: Inline, Segments: addrs(sidEnd)},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			plan, err := Plan(t.Context(), State{}, Config{Paths: []Path{w.path(r)}})
			if err != nil {
				t.Fatal(err)
			}
			if !slices.ContainsFunc(plan.Warnings, func(s string) bool {
				return strings.Contains(s, "core") && strings.Contains(s, "segments4")
			}) {
				t.Errorf("warnings of the plan: %q", plan.Warnings)
			}
			if plan, err = Plan(t.Context(), State{}, Config{Paths: []Path{w.path(around())}}); err != nil || len(plan.Warnings) > 0 {
				t.Errorf("with segments4: %q, %v", plan.Warnings, err)
			}
			w.apply(w.path(r))
			six, four := w.pair(true), w.pair(false)
			w.drain(true)
			for _, size := range []int{1, 1300} {
				if !six.arrives(size, patience) || !four.arrives(size, patience) {
					t.Errorf("%d bytes do not arrive", size)
				}
			}
			if c := w.state("core").Counts; c.Packets != 2 || c.None != 2 {
				t.Errorf("%d packets were rerouted and %d stayed, want 2 and 2", c.Packets, c.None)
			}
		})
	}
}

// Packets too big are answered as by a kernel route with that MTU, or are fragmented.
func TestTooBig(t *testing.T) {
	w := newWorld(t)
	w.apply(w.path(around()))
	w.drain(true)
	w.ip(w.r2, "route add 10.1.0.1/32 via inet6 fd00:32::3")
	for _, p := range []pair{w.pair(true), w.pair(false), w.pairOf(w.r1, "fc00:1::1", addrD), w.pairOf(w.r1, "10.1.0.1", addrD4)} {
		p.discover(t, unix.IP_PMTUDISC_DO)
		nstest.Eventually(t, func() error {
			got := p.mtu(t)
			if got == 1436 {
				return nil
			}
			_, _ = p.from.Write(make([]byte, 1450)) // an error reports the smaller MTU
			return fmt.Errorf("from %s: path MTU %d, want 1436", p.from.LocalAddr(), got)
		})
		headers := 28
		if p.v6 {
			headers = 48
		}
		_, _ = p.from.Write(nil) // it may return an earlier error
		if !p.arrives(1436-headers, patience) {
			t.Errorf("from %s: what fits to the byte does not arrive", p.from.LocalAddr())
		}
	}
	big := w.state("core").Counts.Big
	w.ip(w.s, "route flush cache")
	fresh := w.pairOf(w.s, addrS4, "10.4.0.2")
	fresh.discover(t, unix.IP_PMTUDISC_INTERFACE) // allows fragments, and packets up to the link's MTU
	if !fresh.arrives(1472, patience) {
		t.Error("an IPv4 packet that may be cut does not arrive")
	}
	st := w.state("core")
	if st.Counts.Big == big {
		t.Error("the packet that was cut was not counted as too big")
	}
	if st.Counts.Lost > 0 {
		t.Errorf("%d packets were lost", st.Counts.Lost)
	}
	w.healthy()
}

// Destinations behind one link have their own repairs. The longest prefix wins; others stay on the link.
func TestPrefixes(t *testing.T) {
	w := newWorld(t)
	w.ip(w.r2, "route add fd00:d:1::/48 via fd00:d::2", "route add fd00:d:2::/48 via fd00:d::2")
	w.ip(w.r3, "route add fd00:d:1::/48 via fd00:32::2", "route add fd00:d:2::/48 via fd00:32::2")
	w.ip(w.r1, "route add fd00:d:1::/48 via fd00:12::2", "route add fd00:d:2::/48 via fd00:12::2")
	w.ip(w.d, "addr add fd00:d:1::1/128 dev lo nodad", "addr add fd00:d:1:5::1/128 dev lo nodad", "addr add fd00:d:2::1/128 dev lo nodad")
	named := func(name string, r Repair, prefixes ...string) Path {
		p := w.path(r)
		p.Name = name
		for _, x := range prefixes {
			p.Prefixes = append(p.Prefixes, netip.MustParsePrefix(x))
		}
		return p
	}
	w.apply(named("core", around(), "fd00:d:1::/48", "10.4.0.0/24"), named("inner", Repair{Mode: Inline, Segments: addrs(sidEnd)}, "fd00:d:1:5::/64"))
	w.drain(true)
	for _, c := range []struct{ to, path string }{{"fd00:d:1::1", "core"}, {"fd00:d:1:5::1", "inner"}, {addrD4, "core"}, {"fd00:d:2::1", ""}} {
		from := addrS
		if strings.Contains(c.to, ".") {
			from = addrS4
		}
		before := map[string]uint64{"core": w.state("core").Counts.Packets, "inner": w.state("inner").Counts.Packets}
		if !w.pairOf(w.s, from, c.to).arrives(50, patience) {
			t.Errorf("nothing arrives at %s", c.to)
		}
		for path, n := range before {
			want := n
			if path == c.path {
				want++
			}
			if got := w.state(path).Counts.Packets; got != want {
				t.Errorf("to %s: path %s rerouted %d, want %d", c.to, path, got-n, want-n)
			}
		}
	}
}

// A backup that is down is skipped: the next one is used, or the packet is dropped and counted.
func TestBackupDown(t *testing.T) {
	w := newWorld(t)
	w.cable(w.r1, "spare", w.r3, "r1b", "fd00:14::1/64", "fd00:14::3/64")
	second := around()
	second.Device, second.Via = "spare", netip.MustParseAddr("fd00:14::3")
	w.apply(w.path(around(), second))
	p := w.pair(true)
	w.drain(true)
	if !p.arrives(10, patience) || w.state("core").Counts.Next != 0 {
		t.Fatal("not by the best repair")
	}
	w.mark("back", true)
	if !p.arrives(10, patience) || w.state("core").Counts.Next != 1 {
		t.Errorf("not by the second repair: %+v", w.state("core"))
	}
	if st := w.state("core"); len(st.Repairs) != 2 || !st.Repairs[0].Down || st.Repairs[1].Down || st.Repairs[1].Device != "spare" {
		t.Errorf("state: %+v", st)
	}
	w.mark("spare", true)
	if p.arrives(10, 80*time.Millisecond) {
		t.Error("a packet came by a backup that is down")
	}
	w.until("the packet is counted as stuck", func() bool { return w.state("core").Counts.Stuck > 0 })
	if n := w.state("core").Counts.Stuck; n != 1 {
		t.Errorf("%d packets counted as stuck, want 1", n)
	}
	w.mark("back", false)
	if !p.arrives(10, patience) {
		t.Error("not by the best repair again")
	}
}

// mark sets the carrier byte of a device of r1, as the watcher does.
func (w *world) mark(dev string, down bool) {
	w.Helper()
	locked(w, w.root, func(l *kernel.WriteLock) error {
		all, err := allInstances(w.root)
		if err != nil {
			return err
		}
		s, err := openInstance(l, all[0])
		if err != nil {
			return err
		}
		defer s.close()
		words, err := links.MapWords(s.pins.Maps[pinLinks])
		if err != nil {
			return err
		}
		defer words.Close()
		words.Set(slotOf(w, w.r1, dev), links.CarrierByte, down)
		return nil
	})
}

func locked(t testing.TB, root *kernel.Root, f func(l *kernel.WriteLock) error) {
	t.Helper()
	l, err := root.Lock(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Unlock()
	if err := f(l); err != nil {
		t.Fatal(err)
	}
}

// In shadow mode nothing is rerouted, and the affected packets are counted.
func TestShadow(t *testing.T) {
	w := newWorld(t)
	path := w.path(around())
	path.Shadow = true
	w.apply(path)
	w.drain(true)
	p := w.pair(true)
	for range 3 {
		if !p.arrives(10, patience) { // the link works in fact
			t.Error("a packet in the shadow was lost")
		}
	}
	if c := w.state("core").Counts; c.Shadow != 3 || c.Packets != 0 {
		t.Errorf("counts %+v, want 3 in the shadow", c)
	}
	path.Shadow = false
	if said := w.apply(path); len(said) != 1 {
		t.Errorf("plan %q", said)
	}
	if !p.arrives(10, patience) || w.state("core").Counts.Packets != 1 {
		t.Errorf("not rerouted out of the shadow: %+v", w.state("core"))
	}
}

// Neighbour discovery, BFD and weir's probes stay on the link. A tap on the link shows each packet's way. Counters
// alone cannot, because the kernel sends exempt neighbour discovery and group reports at any time.
func TestExempt(t *testing.T) {
	w := newWorld(t)
	w.apply(w.path(around()))
	tap := w.tapOf(w.r1, "main")
	early := tap.count() // not drained yet, so not counted
	w.drain(true)
	p := w.pairOf(w.r1, "fd00:12::1", addrD)
	send := func(what string, to string, exempt bool, set func(fd int) error) {
		t.Helper()
		before, onLink := w.state("core").Counts, tap.to(to)
		w.in(w.r1, func() error { return sendUDP(to, set) })
		nstest.Until(t, what+" leaves", func() bool { // the packet may wait for its neighbour
			return tap.to(to) != onLink || w.state("core").Counts.Packets != before.Packets
		})
		after := w.state("core").Counts // read after the tap: packets on the link are counted before
		if exempt && (tap.to(to) != onLink+1 || after.Exempt == before.Exempt || after.Packets != before.Packets) ||
			!exempt && (tap.to(to) != onLink || after.Packets != before.Packets+1) {
			t.Errorf("%s: exempt is not %t: %+v, before %+v; on the link %d", what, exempt, after, before, tap.to(to)-onLink)
		}
	}
	hops := func(n int) func(fd int) error {
		return func(fd int) error { return unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, n) }
	}
	send("BFD", "[fd00:12::2]:3784", true, hops(255))
	send("BFD echo", "[fd00:12::2]:3785", true, hops(255))
	send("BFD's port, not from a neighbour", "[fd00:d::2]:3784", false, hops(64))
	send("another port", "[fd00:d::2]:3786", false, hops(255))
	send("a probe", "[fd00:d::2]:9", true, func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, links.Mark) })
	w.ip(w.r1, "neigh del fd00:12::2 dev main")
	before := w.state("core").Counts.Exempt
	_ = p
	w.in(w.r1, func() error { return sendUDP("[fd00:12::2]:9", hops(64)) })
	nstest.Eventually(t, func() error {
		if !strings.Contains(w.ip(w.r1, "-6 neigh show fd00:12::2 dev main"), "lladdr") {
			return fmt.Errorf("the neighbour was not found: %s", w.ip(w.r1, "-6 neigh"))
		}
		return nil
	})
	if w.state("core").Counts.Exempt == before {
		t.Error("neighbour discovery was not counted as exempt")
	}
	// Every packet counted as exempt left by the link. The tap may see it a little later.
	nstest.Eventually(t, func() error {
		exempt := w.state("core").Counts.Exempt
		left := uint64(tap.count() - early)
		if exempt <= left {
			return nil
		}
		return fmt.Errorf("%d packets counted as exempt, and %d left by the link", exempt, left)
	})
}

// tap sees the IP packets leaving a namespace by a device, after all egress programs.
type tap struct {
	testing.TB
	fd   int
	all  int
	seen map[netip.AddrPort]int // IPv6 UDP, by destination
}

func (w *world) tapOf(ns *netns.Handle, device string) *tap {
	w.Helper()
	all := binary.NativeEndian.Uint16([]byte{0, unix.ETH_P_ALL})
	x := &tap{TB: w.TB, seen: map[netip.AddrPort]int{}}
	index := nstest.Ifindex(w, ns, device)
	w.in(ns, func() (err error) {
		// No packet is received before the socket is bound to the device.
		if x.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0); err == nil {
			err = unix.Bind(x.fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: index})
		}
		return err
	})
	w.Cleanup(func() { unix.Close(x.fd) })
	return x
}

// count returns the packets seen so far.
func (x *tap) count() int {
	x.Helper()
	for buf := make([]byte, 2048); ; {
		n, from, err := unix.Recvfrom(x.fd, buf, 0)
		if errors.Is(err, unix.EAGAIN) {
			return x.all
		} else if err != nil {
			x.Fatal(err)
		}
		a, known := from.(*unix.SockaddrLinklayer)
		if !known || a.Pkttype != unix.PACKET_OUTGOING {
			continue
		}
		switch binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, a.Protocol)) {
		case unix.ETH_P_IPV6:
			if b := buf[:n]; n >= 48 && b[6] == unix.IPPROTO_UDP {
				x.seen[netip.AddrPortFrom(netip.AddrFrom16([16]byte(b[24:40])), binary.BigEndian.Uint16(b[42:]))]++
			}
			x.all++
		case unix.ETH_P_IP:
			x.all++
		}
	}
}

// to returns the packets seen to an address and port.
func (x *tap) to(dst string) int {
	x.Helper()
	x.count()
	return x.seen[netip.MustParseAddrPort(dst)]
}

func sendUDP(to string, set func(fd int) error) error {
	a := netip.MustParseAddrPort(to)
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := set(fd); err != nil {
		return err
	}
	if err := unix.Sendto(fd, []byte("one"), 0, &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}); err != nil {
		return fmt.Errorf("send to %s: %w", to, err)
	}
	return nil
}
