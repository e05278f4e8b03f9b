// SPDX-License-Identifier: Apache-2.0

package quarantine

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/quarantine/bpf"
	"github.com/weir-project/weir/feature/handoff/repair"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

func TestMain(m *testing.M) {
	nstest.Play(map[string]nstest.Role{"upgrade": playUpgrade})
	nstest.Main(m)
}

// raw is a client that sends raw frames to a server with a quarantine, and receives RSTs.
type raw struct {
	*testing.T
	client, server *netns.Handle
	quarantine     *Quarantine
	fd             int
	mac            [2]net.HardwareAddr // of the server and of the client
}

var (
	rawClient  = netip.MustParseAddr("fd01::2")
	rawBackend = netip.MustParseAddr("fd01::1")
	rawSegment = netip.MustParseAddr("fd01::e") // another address of the server
	rawClient4 = netip.MustParseAddr("10.1.0.2")
	rawServer4 = netip.MustParseAddr("10.1.0.1")
)

const (
	rawPort  = 9000 // of the session at the server
	rawOther = 9001 // of another flow

	resetTime = 4 * time.Second
)

func newRaw(t *testing.T, tcx bool) *raw {
	t.Helper()
	nstest.NeedRoot(t)
	r := &raw{T: t, client: nstest.NewNetns(t), server: nstest.NewNetns(t)}
	nstest.Cable(t, r.client, "w0", r.server, "w0")
	r.in(r.server, func() error {
		return errors.Join(os.WriteFile("/proc/sys/net/ipv6/conf/all/seg6_enabled", []byte("1"), 0), os.WriteFile("/proc/sys/net/ipv6/conf/w0/seg6_enabled", []byte("1"), 0),
			os.WriteFile("/proc/sys/net/ipv4/tcp_invalid_ratelimit", []byte("0"), 0), os.WriteFile("/proc/sys/net/ipv6/icmp/ratelimit", []byte("0"), 0))
	})
	nstest.Address(t, r.client, "w0", netip.PrefixFrom(rawClient, 64), netip.PrefixFrom(rawClient4, 24))
	nstest.Address(t, r.server, "w0", netip.PrefixFrom(rawBackend, 64), netip.PrefixFrom(rawSegment, 64), netip.PrefixFrom(rawServer4, 24))
	for i, ns := range []*netns.Handle{r.server, r.client} {
		nstest.AwaitAddresses(t, ns)
		r.in(ns, func() error {
			d, err := net.InterfaceByName("w0")
			if err == nil {
				r.mac[i] = d.HardwareAddr
			}
			return err
		})
	}
	if !tcx {
		was := hasTCX
		hasTCX = func() bool { return false }
		t.Cleanup(func() { hasTCX = was })
	}
	root := kernel.OpenRoot(nstest.BPFFS + "/" + strings.ReplaceAll(t.Name(), "/", "-"))
	quarantine, err := Open(t.Context(), root, r.server, []string{"w0"}, slog.New(slog.NewTextHandler(t.Output(), nil)))
	if err != nil {
		t.Fatal(err)
	}
	r.quarantine = quarantine
	t.Cleanup(func() {
		quarantine.Close()
		l, err := root.Lock(context.Background())
		if err != nil {
			t.Error(err)
			return
		}
		defer l.Unlock()
		if err := Remove(l, r.server); err != nil {
			t.Error(err)
		}
	})
	r.in(r.client, func() (err error) {
		d, err := net.InterfaceByName("w0")
		if err != nil {
			return err
		}
		if r.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(binary.BigEndian.Uint16([]byte{unix.ETH_P_ALL & 0xff, 0}))); err != nil {
			return err
		}
		return unix.Bind(r.fd, &unix.SockaddrLinklayer{Ifindex: d.Index, Protocol: 0x0300})
	})
	t.Cleanup(func() { unix.Close(r.fd) })
	return r
}

func (r *raw) in(ns *netns.Handle, f func() error) {
	r.Helper()
	if err := ns.Do(f); err != nil {
		r.Fatal(err)
	}
}

func (r *raw) send(packet []byte) {
	r.Helper()
	proto := []byte{0x86, 0xdd}
	if packet[0]>>4 == 4 {
		proto = []byte{0x08, 0x00}
	}
	if _, err := unix.Write(r.fd, slices.Concat(r.mac[0], r.mac[1], proto, packet)); err != nil {
		r.Fatal(err)
	}
}

// reset reports whether an RST of the server arrives at a port of the client.
func (r *raw) reset(port uint16, wait time.Duration) bool {
	r.Helper()
	b := make([]byte, 2000)
	for end := time.Now().Add(wait); ; {
		left := time.Until(end)
		if left <= 0 {
			return false
		}
		tv := unix.NsecToTimeval(int64(left))
		if err := unix.SetsockoptTimeval(r.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
			r.Fatal(err)
		}
		n, from, err := unix.Recvfrom(r.fd, b, 0)
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
			continue
		} else if err != nil {
			r.Fatal(err)
		}
		if at, ok := from.(*unix.SockaddrLinklayer); !ok || at.Pkttype == unix.PACKET_OUTGOING {
			continue
		}
		tcp := 14 + 40
		if n > 14 && b[12] == 8 {
			tcp = 14 + 20
		}
		if n >= tcp+20 && (b[12] == 8 && b[14+9] == unix.IPPROTO_TCP || b[12] == 0x86 && b[14+6] == unix.IPPROTO_TCP) &&
			binary.BigEndian.Uint16(b[tcp+2:]) == port && b[tcp+13]&4 != 0 {
			return true
		}
	}
}

// segment returns a TCP segment with ACK. A kernel without its socket answers with an RST.
func segment(from, to netip.Addr, fromPort, toPort uint16) []byte {
	b := make([]byte, 20, 64)
	binary.BigEndian.PutUint16(b, fromPort)
	binary.BigEndian.PutUint16(b[2:], toPort)
	binary.BigEndian.PutUint32(b[4:], 1)
	binary.BigEndian.PutUint32(b[8:], 1)
	b[12], b[13] = 5<<4, 0x10
	binary.BigEndian.PutUint16(b[14:], 1000)
	b = append(b, "0123456789abcdef01234567"...) // enough for several fragments
	sum := uint32(unix.IPPROTO_TCP + len(b))
	for _, part := range [][]byte{from.AsSlice(), to.AsSlice(), b} {
		for i := 0; i < len(part); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(part[i:]))
		}
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	binary.BigEndian.PutUint16(b[16:], ^uint16(sum))
	return b
}

// extension is an IPv6 extension header: its number, and its bytes without the next header's number.
type extension struct {
	number byte
	bytes  []byte
}

// packet6 puts headers before a payload of that protocol.
func packet6(to netip.Addr, payload []byte, proto byte, all ...extension) []byte {
	b := make([]byte, 40)
	b[0], b[7] = 0x60, 64
	copy(b[8:], rawClient.AsSlice())
	copy(b[24:], to.AsSlice())
	at := 6
	for _, e := range all {
		b[at] = e.number
		at = len(b)
		b = append(b, e.bytes...)
	}
	b[at] = proto
	b = append(b, payload...)
	binary.BigEndian.PutUint16(b[4:], uint16(len(b)-40))
	return b
}

// packet4 returns a TCP fragment in IPv4.
func packet4(payload []byte, offset, flags uint16, id byte) []byte {
	b := make([]byte, 20)
	b[0], b[8], b[9] = 0x45, 64, unix.IPPROTO_TCP
	binary.BigEndian.PutUint16(b[2:], uint16(20+len(payload)))
	b[5] = id
	binary.BigEndian.PutUint16(b[6:], flags|offset/8)
	copy(b[12:], rawClient4.AsSlice())
	copy(b[16:], rawServer4.AsSlice())
	sum := uint32(0)
	for i := 0; i < 20; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	binary.BigEndian.PutUint16(b[10:], ^uint16(sum))
	return append(b, payload...)
}

// fragmentAt returns a fragment header.
func fragmentAt(offset uint16, more bool, id byte) extension {
	b := []byte{0, 0, 0, 0, 0, 0, 0, id}
	if more {
		offset |= 1
	}
	binary.BigEndian.PutUint16(b[2:], offset)
	return extension{unix.IPPROTO_FRAGMENT, b}
}

// options returns an options header with an option that hosts skip if unknown (RFC 4727).
func options(number byte, units int) extension {
	b := make([]byte, 8*units)
	b[1], b[2], b[3] = byte(units-1), 0x1e, byte(8*units-4)
	return extension{number, b}
}

// TestQuarantineReadsExtensions checks that no extension header or fragment bypasses the quarantine. The stack would
// answer with an RST. Other flows between the same addresses pass.
func TestQuarantineReadsExtensions(t *testing.T) {
	for name, tcx := range map[string]bool{"tcx": true, "filters": false} {
		if tcx && !hasTCX() {
			continue // this kernel has only filters
		}
		t.Run(name, func(t *testing.T) { newRaw(t, tcx).quarantineReadsExtensions() })
	}
}

func (r *raw) quarantineReadsExtensions() {
	hop, dest := options(unix.IPPROTO_HOPOPTS, 1), options(unix.IPPROTO_DSTOPTS, 3)
	routed := extension{unix.IPPROTO_ROUTING, append([]byte{0, 2, 4, 0, 0, 0, 0, 0}, rawBackend.AsSlice()...)}
	midway := extension{unix.IPPROTO_ROUTING, append([]byte{0, 2, 4, 1, 0, 0, 0, 0}, rawBackend.AsSlice()...)}
	midway.bytes[3] = 1
	auth := extension{unix.IPPROTO_AH, append([]byte{0, 4, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1}, make([]byte, 12)...)}
	var many []extension
	for range 9 {
		many = append(many, options(unix.IPPROTO_DSTOPTS, 1))
	}
	id := byte(0)
	one := func(to netip.Addr, all ...extension) func(tcp []byte) [][]byte {
		return func(tcp []byte) [][]byte { return [][]byte{packet6(to, tcp, unix.IPPROTO_TCP, all...)} }
	}
	cases := []struct {
		name    string
		packets func(tcp []byte) [][]byte
		lost    bool // by the kernel, even without a quarantine
		v4      bool
		doubt   bool // another flow's packet is dropped as well, because it is not distinguishable
	}{
		{name: "none", packets: one(rawBackend)},
		{name: "hop-by-hop", packets: one(rawBackend, hop)},
		{name: "destination options", packets: one(rawBackend, dest)},
		{name: "routing", packets: one(rawBackend, routed)},
		{name: "routing, midway", packets: one(rawSegment, midway), lost: true},
		{name: "atomic fragment", packets: one(rawBackend, fragmentAt(0, false, 0))},
		{name: "AH", packets: one(rawBackend, auth), lost: true},
		{name: "hop-by-hop, destination, routing, fragment, destination", packets: one(rawBackend, hop, dest, routed, fragmentAt(0, false, 0), dest)},
		{name: "eight", packets: one(rawBackend, many[:8]...)},
		{name: "nine", packets: one(rawBackend, many...), lost: true, doubt: true},
		{name: "fragments", packets: func(tcp []byte) [][]byte {
			id++
			return [][]byte{packet6(rawBackend, tcp[:24], unix.IPPROTO_TCP, fragmentAt(0, true, id)), packet6(rawBackend, tcp[24:], unix.IPPROTO_TCP, fragmentAt(24, false, id))}
		}},
		{name: "a first fragment of 8 bytes", packets: func(tcp []byte) [][]byte { // Linux accepts it because it has the ports; before 5.11 unconditionally
			id++
			return [][]byte{packet6(rawBackend, tcp[:8], unix.IPPROTO_TCP, fragmentAt(0, true, id)), packet6(rawBackend, tcp[8:], unix.IPPROTO_TCP, fragmentAt(8, false, id))}
		}, lost: true},
		{name: "a first fragment without the transport header", packets: func(tcp []byte) [][]byte {
			id++
			whole := append(slices.Clone(options(unix.IPPROTO_DSTOPTS, 1).bytes), tcp...)
			whole[0] = unix.IPPROTO_TCP
			return [][]byte{packet6(rawBackend, whole[:8], unix.IPPROTO_DSTOPTS, fragmentAt(0, true, id)), packet6(rawBackend, whole[8:], unix.IPPROTO_DSTOPTS, fragmentAt(8, false, id))}
		}, lost: true, doubt: true},
		{name: "IPv4", packets: func(tcp []byte) [][]byte { return [][]byte{packet4(tcp, 0, 0, 0)} }, v4: true},
		{name: "IPv4, a first fragment of 8 bytes", packets: func(tcp []byte) [][]byte {
			id++
			return [][]byte{packet4(tcp[:8], 0, 0x2000, id), packet4(tcp[8:], 8, 0, id)}
		}, v4: true},
	}
	port := uint16(40000)
	for _, c := range cases {
		from, to := rawClient, rawBackend
		if c.v4 {
			from, to = rawClient4, rawServer4
		}
		send := func(toPort uint16) {
			for _, p := range c.packets(segment(from, to, port, toPort)) {
				r.send(p)
			}
		}
		port++
		if !c.lost {
			if send(rawPort); !r.reset(port, resetTime) {
				r.Errorf("%s: without a session the kernel says no reset: the packet does not come to it", c.name)
			}
		}
		flow := repair.Flow{Local: netip.AddrPortFrom(to, rawPort), Remote: netip.AddrPortFrom(from, port)}
		if err := r.quarantine.Shut(flow, 1); err != nil {
			r.Fatal(err)
		}
		before := r.stopped()
		if send(rawPort); r.reset(port, 100*time.Millisecond) {
			r.Errorf("%s: the kernel says reset: the quarantine lets it pass", c.name)
		}
		if n := r.stopped() - before; n != 1 {
			r.Errorf("%s: %d packets are stopped", c.name, n)
		}
		before = r.stopped()
		send(rawOther)
		if got := r.stopped() - before; (got != 0) != c.doubt {
			r.Errorf("%s: %d packets of another flow are stopped", c.name, got)
		} else if !c.doubt && !c.lost && !r.reset(port, resetTime) {
			r.Errorf("%s: the other flow does not pass", c.name)
		}
	}
	// Addresses without a session are never in doubt.
	strange := packet6(rawBackend, nil, unix.IPPROTO_TCP, many...)
	copy(strange[8:], netip.MustParseAddr("fd01::77").AsSlice())
	before := r.stopped()
	if r.send(strange); r.stopped() != before {
		r.Error("a packet of other ends is stopped")
	}
}

// stopped returns the number of packets blocked by the quarantine.
func (r *raw) stopped() uint64 {
	r.Helper()
	c, err := r.quarantine.Counts()
	if err != nil {
		r.Fatal(err)
	}
	return c.Returned + c.Deaf
}

// TestQuarantineKnowsEndsAgain checks that the next agent's quarantine knows the address pairs of existing sessions.
func TestQuarantineKnowsEndsAgain(t *testing.T) {
	r := newRaw(t, hasTCX())
	flow := repair.Flow{Local: netip.AddrPortFrom(rawBackend, rawPort), Remote: netip.AddrPortFrom(rawClient, 4000)}
	if err := r.quarantine.Shut(flow, 1); err != nil {
		t.Fatal(err)
	}
	r.quarantine.Close()
	root := kernel.OpenRoot(nstest.BPFFS + "/" + t.Name())
	again, err := Open(t.Context(), root, r.server, []string{"w0"}, slog.New(slog.NewTextHandler(t.Output(), nil)))
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	k := quarantineKey(flow)
	var v uint8
	if err := again.pairs.Lookup(&bpf.QuarantineQuarantinePair{Client: k.Client, Service: k.Service}, &v); err != nil {
		t.Error(fmt.Errorf("the ends of %s: %w", flow, err))
	}
	if !bytes.Equal(k.Client[:], rawClient.AsSlice()) {
		t.Errorf("the client is %x", k.Client)
	}
}
