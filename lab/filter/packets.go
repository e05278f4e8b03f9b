// SPDX-License-Identifier: Apache-2.0

package filters

import (
	"encoding/binary"
	"math/rand/v2"

	"github.com/weir-project/weir/feature/filter/expr"
)

var be = binary.BigEndian

// packet is an Ethernet frame received by the kernel. Its addresses, ports and payloads are among the
// values in filtertest's random expressions.
type packet struct {
	frame []byte
	l3    int // first byte of the IP packet
	end   int // its end: padding follows
	// stack reports whether the packet reaches netfilter. It does not behind a VLAN tag without a VLAN
	// device.
	stack bool
	to    target
	last  byte // the protocol behind IP and its extension headers
}

// target is the receiving socket of a packet.
type target int

const (
	nobody    target = iota // a fragment, or a packet without a socket
	transport               // a socket with a filter from the transport header on: UDP, raw IPv6
	rawIPv4                 // a socket with a filter from the IP header on
)

// link and network return the packet as seen by hooks.
func (p *packet) link() *expr.Packet { return &expr.Packet{Data: p.frame, Layer: expr.Link} }
func (p *packet) network() *expr.Packet {
	return &expr.Packet{Data: p.frame[p.l3:p.end], Layer: expr.Network}
}

// The host's addresses, and the source addresses of packets.
var (
	host4    = [4]byte{10, 1, 2, 4}
	host6    = [16]byte{0x20, 0x01, 0x0d, 0xb8, 15: 2}
	sources4 = [][4]byte{{10, 1, 2, 3}, {192, 0, 2, 1}, {10, 2, 0, 0}}
	sources6 = [][16]byte{{0x20, 0x01, 0x0d, 0xb8, 15: 1}, {0x20, 0x01, 0x0d, 0xb8, 0, 1, 0xff, 0xff}}
	ports    = []uint16{53, 80, 443, 4739, 5060}
	payloads = []string{"", "x", "hello xyzzy", "xyzzy", "INVITE sip:a@b SIP/2.0\r\n", "INVITED x", "abcabcabcd", "GET / HTTP/1.1\r\n\r\n",
		"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x07eXample\x03COM\x00\x00\x01\x00\x01", "\x16\x03\x01\x02\x00"}
)

// ours is an expression for packets of the test, and not for packets sent by the kernel on its own.
const ours = "net.dst in {10.1.2.4 2001:db8::2}"

func pick[T any](r *rand.Rand, of []T) T { return of[r.IntN(len(of))] }

// IP protocols, and extension headers of IPv6.
const (
	protoICMP, protoTCP, protoUDP, protoICMP6              = 1, 6, 17, 58
	headerHop, headerRouting, headerFragment, headerOption = 0, 43, 44, 60
)

// newPacket draws a packet. tagged allows VLAN tags.
func newPacket(r *rand.Rand, macs []byte, tagged bool) *packet {
	p := &packet{frame: append([]byte(nil), macs...), stack: true, to: transport}
	if tagged && r.IntN(6) == 0 {
		p.stack, p.to = false, nobody
		for range 1 + r.IntN(2) {
			p.frame = be.AppendUint16(be.AppendUint16(p.frame, pick(r, []uint16{0x8100, 0x88a8})), pick(r, []uint16{1, 7, 100, 0x2007}))
		}
	}
	p.l3 = len(p.frame) + 2
	if r.IntN(2) == 0 {
		p.frame = append(be.AppendUint16(p.frame, 0x0800), p.ipv4(r)...)
	} else {
		p.frame = append(be.AppendUint16(p.frame, 0x86dd), p.ipv6(r)...)
	}
	p.end = len(p.frame)
	if r.IntN(4) == 0 { // Ethernet's padding, not payload
		p.frame = append(p.frame, make([]byte, r.IntN(20))...)
	}
	return p
}

func (p *packet) ipv4(r *rand.Rand) []byte {
	options := pick(r, []int{0, 0, 0, 4, 12})
	b := make([]byte, 20+options)
	for i := range options {
		b[20+i] = 1 // no operation
	}
	src := pick(r, sources4)
	copy(b[12:], src[:])
	copy(b[16:], host4[:])
	b[0], b[1], b[8] = 0x40|byte(5+options/4), pick(r, []byte{0, 0xb8, 1}), pick(r, []byte{1, 64, 255})
	be.PutUint16(b[4:], uint16(r.Uint32()))
	var body []byte
	b[9], body = segment(r, b[12:20], false)
	p.last = b[9]
	if b[9] != protoUDP && p.to != nobody {
		p.to = rawIPv4
	}
	if f := r.IntN(8); f < 2 { // the first of several fragments, or a later one
		p.to = nobody
		be.PutUint16(b[6:], []uint16{0x2000, 0x2000 | uint16(1+r.IntN(20))}[f])
		body = append(body, make([]byte, (8-len(body)%8)%8)...) // all fragments except the last consist of whole units
	} else if r.IntN(2) == 0 {
		be.PutUint16(b[6:], 0x4000)
	}
	be.PutUint16(b[2:], uint16(len(b)+len(body)))
	be.PutUint16(b[10:], checksum(b))
	return append(b, body...)
}

func (p *packet) ipv6(r *rand.Rand) []byte {
	src := pick(r, sources6)
	next, body := segment(r, append(src[:], host6[:]...), true)
	p.last = next
	for n := pick(r, []int{0, 0, 0, 1, 2}); n > 0; n-- {
		next, body = extension(next, body, pick(r, []byte{headerRouting, headerOption}), nil)
	}
	if f := r.IntN(8); f < 2 {
		p.to = nobody
		body = append(body, make([]byte, (8-len(body)%8)%8)...)
		h := be.AppendUint16(nil, []uint16{1, uint16(1+r.IntN(20))<<3 | 1}[f])
		next, body = extension(next, body, headerFragment, be.AppendUint32(h, r.Uint32()))
	}
	if r.IntN(8) == 0 { // must be the first
		next, body = extension(next, body, headerHop, nil)
	}
	b := be.AppendUint32(nil, 0x60000000|pick(r, []uint32{0, 0x0b800000, 0x12345}))
	b = append(be.AppendUint16(b, uint16(len(body))), next, pick(r, []byte{1, 64, 255}))
	return append(append(append(b, src[:]...), host6[:]...), body...)
}

// extension puts a header before body. Without fields it is a header without effect: a padding option, or a
// route with no segments left.
func extension(next byte, body []byte, kind byte, fields []byte) (byte, []byte) {
	h := append([]byte{next, 0}, fields...)
	switch {
	case fields != nil:
	case kind == headerRouting:
		h = append(h, 0, 0, 0, 0, 0, 0)
	default:
		h = append(h, 1, 4, 0, 0, 0, 0) // PadN
	}
	return kind, append(h, body...)
}

// segment returns the payload of IP with a right checksum. addrs holds both addresses.
func segment(r *rand.Rand, addrs []byte, ipv6 bool) (proto byte, b []byte) {
	payload := []byte(pick(r, payloads) + pick(r, payloads))
	if r.IntN(8) == 0 {
		payload = append(make([]byte, 200+r.IntN(200)), payload...)
	}
	between := be.AppendUint16(be.AppendUint16(nil, pick(r, ports)), pick(r, ports))
	at := 0
	switch r.IntN(5) {
	case 0, 1:
		proto, at = protoUDP, 6
		b = append(be.AppendUint16(between, uint16(8+len(payload))), 0, 0)
	case 2, 3:
		proto, at = protoTCP, 16
		b = tcp(r, between)
	case 4:
		proto, at = protoICMP, 2
		b = []byte{8, 0, 0, 0, 0x12, 0x34, 0, 7}
		if ipv6 {
			proto, b[0] = protoICMP6, 128
		}
	}
	b = append(b, payload...)
	sum := b
	var behind []byte
	if proto == protoUDP && r.IntN(6) == 0 { // bytes behind UDP's own length
		behind = []byte(pick(r, payloads))
	}
	if proto != protoICMP { // also over a pseudo header: RFC 8200, 8.1; RFC 9293, 3.1
		sum = append(append([]byte(nil), addrs...), 0, proto, byte(len(b)>>8), byte(len(b)))
		sum = append(sum, b...)
	}
	be.PutUint16(b[at:], checksum(sum))
	return proto, append(b, behind...)
}

// tcp returns a header without a checksum, in most cases a SYN.
func tcp(r *rand.Rand, between []byte) []byte {
	var options []byte
	for range r.IntN(4) {
		options = append(options, pick(r, []string{"\x02\x04\x05\xb4", "\x01", "\x03\x03\x07", "\x04\x02", "\x08\x0a\x00\x00\x00\x01\x00\x00\x00\x02"})...)
	}
	for len(options)%4 != 0 {
		options = append(options, 1)
	}
	b := append(between, 0, 0, 0, 1, 0, 0, 0, 2, byte(5+len(options)/4)<<4, pick(r, []byte{2, 2, 2, 0x12, 0x10, 4, 0x11}), 0xfa, 0xf0, 0, 0, 0, 0)
	return append(b, options...)
}

// checksum computes the checksum of RFC 1071 over bytes with a zero checksum field. It never returns 0,
// because a UDP checksum of 0 means no checksum.
func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i < len(b); i += 2 {
		if i+1 < len(b) {
			sum += uint32(be.Uint16(b[i:]))
		} else {
			sum += uint32(b[i]) << 8
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
