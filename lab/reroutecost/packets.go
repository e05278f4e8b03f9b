// SPDX-License-Identifier: Apache-2.0

package reroutecost

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"
)

// checksum computes the Internet checksum of a transport's bytes with the pseudo header (RFC 8200, 8.1; RFC
// 768): addrs holds source and destination.
func checksum(addrs, b []byte, proto uint8) uint16 {
	sum := uint32(proto) + uint32(len(b))
	for _, part := range [][]byte{addrs, b} {
		for i := 0; i+1 < len(part); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(part[i:]))
		}
		if len(part)%2 == 1 {
			sum += uint32(part[len(part)-1]) << 8
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	if sum == 0xffff {
		return 0xffff
	}
	return ^uint16(sum)
}

// sample is a packet to be rerouted.
type sample struct {
	what  string
	ip    []byte
	token []byte // part of its payload, to recognize it
}

// packets returns packet i of every kind: lengths from zero to the maximum, traffic classes, flow labels,
// options.
func (c *catcher) packets(i int) []sample {
	from, to := netip.MustParseAddr("fd00:a::2"), netip.MustParseAddr(hostD)
	size := []int{0, 1, 7, 64, 333, 1000, 1250}[i%7] + i
	var out []sample
	for _, kind := range []string{"IPv6", "IPv6 with a flow label", "IPv6 with options", "IPv6 fragment", "IPv4"} {
		payload := make([]byte, 8+min(size, 1290))
		for n := range payload {
			payload[n] = byte(c.x.env.Rand.Uint32())
		}
		p := packet6(from, to, uint16(1024+i), 53, payload)
		switch kind {
		case "IPv6 with a flow label":
			binary.BigEndian.PutUint32(p, 6<<28|uint32(i%256)<<20|uint32(0x12345+i)) // also every traffic class
		case "IPv6 with options":
			p = withOptions(p)
		case "IPv6 fragment":
			p = fragment(p)
		case "IPv4":
			p = packet4(i, payload)
		}
		out = append(out, sample{kind, p, payload[:8]})
	}
	return out
}

// withOptions puts destination options between an IPv6 header and its transport.
func withOptions(p []byte) []byte {
	out := append(bytes.Clone(p[:40]), p[6], 0, 1, 4, 0, 0, 0, 0)
	out = append(out, p[40:]...)
	out[6] = unix.IPPROTO_DSTOPTS
	binary.BigEndian.PutUint16(out[4:], uint16(len(out)-40))
	return out
}

// fragment returns the first fragment of a packet.
func fragment(p []byte) []byte {
	out := append(bytes.Clone(p[:40]), p[6], 0, 0, 1, 0, 0, 0, 9)
	out = append(out, p[40:]...)
	out[6] = unix.IPPROTO_FRAGMENT
	binary.BigEndian.PutUint16(out[4:], uint16(len(out)-40))
	return out
}

// packet4 returns a UDP packet over IPv4.
func packet4(i int, payload []byte) []byte {
	p := []byte{0x45, byte(i), 0, 0, 0, byte(i), 0, 0, 64, unix.IPPROTO_UDP, 0, 0, 10, 1, 0, 2, 10, 4, 0, 2}
	binary.BigEndian.PutUint16(p[2:], uint16(28+len(payload)))
	udp := binary.BigEndian.AppendUint16([]byte{8, 0, 0, 53}, uint16(8+len(payload)))
	udp = append(append(udp, 0, 0), payload...)
	binary.BigEndian.PutUint16(udp[6:], checksum(p[12:20], udp, unix.IPPROTO_UDP))
	sum4(p)
	return append(p, udp...)
}

// sum4 sets the checksum of an IPv4 header.
func sum4(p []byte) {
	p[10], p[11] = 0, 0
	sum := uint32(0)
	for i := 0; i < 20; i += 2 {
		if i != 10 {
			sum += uint32(binary.BigEndian.Uint16(p[i:]))
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	binary.BigEndian.PutUint16(p[10:], ^uint16(sum))
}

// forwarded returns a packet as forwarded by a router.
func forwarded(p []byte) []byte {
	p = bytes.Clone(p)
	if p[0]>>4 == 6 {
		p[7]--
		return p
	}
	p[8]--
	sum4(p)
	return p
}

// check reports a fault of a rerouted packet.
func (s shape) check(got []byte, p sample) error {
	want := forwarded(p.ip)
	if len(got) < 40 || got[0]>>4 != 6 {
		return fmt.Errorf("no IPv6 header: % x", got[:min(len(got), 8)])
	}
	if n := int(binary.BigEndian.Uint16(got[4:])); n != len(got)-40 {
		return fmt.Errorf("its length is %d, and %d bytes follow", n, len(got)-40)
	}
	if s.inline && p.ip[0]>>4 == 6 {
		return s.checkInline(got, want)
	}
	segments, next := s.segments, uint8(unix.IPPROTO_IPV6)
	class, flow := want[0]<<4|want[1]>>4, binary.BigEndian.Uint32(want)&0xfffff
	if p.ip[0]>>4 == 4 {
		next, class, flow = unix.IPPROTO_IPIP, want[1], 0
		if s.inline {
			segments = []string{sidVia, sidOut}
		}
	}
	if c := got[0]<<4 | got[1]>>4; c != class {
		return fmt.Errorf("traffic class %#x, want %#x", c, class)
	}
	if l := binary.BigEndian.Uint32(got) & 0xfffff; l == 0 || flow != 0 && l != flow {
		return fmt.Errorf("flow label %#x, for a packet with %#x", l, flow)
	}
	if a := netip.AddrFrom16([16]byte(got[8:24])); a.String() != "fc00:1::1" || got[7] != 64 {
		return fmt.Errorf("from %s with hop limit %d", a, got[7])
	}
	rest := got[40:]
	if len(segments) > 1 {
		if got[6] != unix.IPPROTO_ROUTING {
			return fmt.Errorf("next header %d, want a routing header", got[6])
		}
		var err error
		if rest, err = routing(rest, next, addresses(segments[1:]...)); err != nil {
			return err
		}
	} else if got[6] != next {
		return fmt.Errorf("next header %d, want %d", got[6], next)
	}
	if a := netip.AddrFrom16([16]byte(got[24:40])); a.String() != segments[0] {
		return fmt.Errorf("to %s, want %s", a, segments[0])
	}
	if !bytes.Equal(rest, want) {
		return fmt.Errorf("the inner packet is % x, want % x", rest[:min(len(rest), 48)], want[:min(len(want), 48)])
	}
	return nil
}

// checkInline checks packets with an inserted routing header.
func (s shape) checkInline(got, want []byte) error {
	final := netip.AddrFrom16([16]byte(want[24:40]))
	rest, err := routing(got[40:], want[6], append(addresses(s.segments[1:]...), final))
	if err != nil {
		return err
	}
	own := bytes.Clone(got[:40])
	if a := netip.AddrFrom16([16]byte(own[24:40])); a.String() != s.segments[0] || own[6] != unix.IPPROTO_ROUTING {
		return fmt.Errorf("to %s with next header %d", a, own[6])
	}
	// The rest is the packet's own header.
	copy(own[4:7], want[4:7])
	copy(own[24:], want[24:40])
	if !bytes.Equal(own, want[:40]) {
		return fmt.Errorf("its own header is % x, want % x", own, want[:40])
	}
	if !bytes.Equal(rest, want[40:]) {
		return fmt.Errorf("wrong bytes after the headers")
	}
	return nil
}

// routing parses a reduced segment routing header (RFC 8754, 2) with the segments of left, and returns the
// bytes after it.
func routing(b []byte, next uint8, left []netip.Addr) ([]byte, error) {
	n := len(left)
	if len(b) < 8+16*n || b[0] != next || int(b[1]) != 2*n || b[2] != 4 || int(b[3]) != n || int(b[4]) != n-1 || b[5]|b[6]|b[7] != 0 {
		return nil, fmt.Errorf("routing header % x, want next header %d and %d segments left", b[:min(len(b), 8)], next, n)
	}
	for i, want := range left {
		if a := netip.AddrFrom16([16]byte(b[8+16*(n-1-i):])); a != want {
			return nil, fmt.Errorf("segment %d is %s, want %s", i, a, want)
		}
	}
	return b[8+16*n:], nil
}

func ipnet(text string) *net.IPNet {
	_, n, _ := net.ParseCIDR(text)
	return n
}
