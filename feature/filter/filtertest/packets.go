// SPDX-License-Identifier: Apache-2.0

// Package filtertest compares compiled filters with the interpreter, by random expressions and
// random, often malformed packets. Tests and the lab use it.
package filtertest

import (
	"encoding/binary"
	"math/rand/v2"
)

var be = binary.BigEndian

// Few distinct values make comparisons match often.
var (
	ports     = []uint16{53, 80, 443, 4739, 5060, 0, 65535}
	addrs4    = [][4]byte{{10, 1, 2, 3}, {10, 1, 2, 4}, {192, 0, 2, 1}, {224, 0, 0, 1}, {255, 255, 255, 255}, {0, 0, 0, 0}, {10, 2, 0, 0}}
	addrs6    = []string{"\x20\x01\x0d\xb8" + zeros(11) + "\x01", "\x20\x01\x0d\xb8" + zeros(11) + "\x02", "\xfe\x80" + zeros(13) + "\x01", zeros(16), "\x20\x01\x0d\xb8\x00\x01\xff\xff" + zeros(8)}
	macs      = []string{"\x02\x00\x00\x00\x00\x01", "\x02\x00\x00\x00\x00\x02", "\xff\xff\xff\xff\xff\xff"}
	payloads  = []string{"", "x", "hello xyzzy", "xyzzy", "INVITE sip:a@b SIP/2.0\r\n", "REGISTER sip:a SIP/2.0", "INVITED x", "abcabcabcd", "GET / HTTP/1.1\r\nHost: example.com\r\n\r\n", "ACK x", " ", "\x16\x03\x01\x02\x00"}
	questions = []string{"\x07example\x03com\x00", "\x07eXample\x03COM\x00", "\x03www\x07example\x03com\x00", "\x00", "\x40abc", "\x05short", "\xc0\x0c"}
)

func zeros(n int) string { return string(make([]byte, n)) }

func pick[T any](r *rand.Rand, of []T) T { return of[r.IntN(len(of))] }

// one returns true once in n calls on average.
func one(r *rand.Rand, n int) bool { return r.IntN(n) == 0 }

// Packet returns an Ethernet frame of at least 34 bytes. Most are well-formed. Some of every kind
// are not.
func Packet(r *rand.Rand) []byte {
	b := append([]byte(pick(r, macs)), pick(r, macs)...)
	for n := pick(r, []int{0, 0, 0, 0, 0, 0, 1, 2, 2, 3, 5, 33, 34, 35}); n > 0; n-- {
		b = be.AppendUint16(b, pick(r, []uint16{0x8100, 0x88a8}))
		b = be.AppendUint16(b, pick(r, []uint16{1, 7, 100, 0x2007, 0x3064, 0xffff}))
	}
	switch r.IntN(16) {
	case 0:
		b = append(b, 0x08, 0x06)
		b = append(b, noise(r, 46)...)
	case 1, 2, 3, 4, 5, 6:
		b = append(b, 0x86, 0xdd)
		b = append(b, ipv6(r)...)
	default:
		b = append(b, 0x08, 0x00)
		b = append(b, ipv4(r)...)
	}
	if one(r, 4) { // Ethernet padding
		b = append(b, noise(r, r.IntN(20))...)
	}
	if one(r, 8) { // truncated
		b = b[:14+r.IntN(len(b)-13)]
	}
	for one(r, 6) { // a flipped bit, most likely in a header
		i := 12 + r.IntN(min(len(b)-12, 60))
		b[i] ^= 1 << r.IntN(8)
	}
	if len(b) < 34 {
		b = append(b, noise(r, 34-len(b))...)
	}
	return b
}

// datagram is Packet without the link layer, at least 20 bytes, for hooks with test runs from the
// IP header on.
func datagram(r *rand.Rand) []byte {
	for {
		if b := Packet(r); b[12] == 8 && b[13] == 0 || b[12] == 0x86 && b[13] == 0xdd || one(r, 20) {
			return b[14:]
		}
	}
}

func noise(r *rand.Rand, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

func ipv4(r *rand.Rand) []byte {
	options := pick(r, []int{0, 0, 0, 0, 4, 8, 40})
	proto, body := transport(r, false)
	if one(r, 8) { // a first fragment below the minimum length
		body = body[:min(len(body), pick(r, []int{0, 3, 4, 7, 8, 12, 16, 19, 20, 24}))]
	}
	for one(r, 10) { // two authentication headers are one too many
		units := pick(r, []int{0, 1, 4})
		h := noise(r, 8+4*units)
		h[0], h[1] = proto, byte(units)
		proto, body = 51, append(h, body...)
		if one(r, 4) {
			body = body[:min(len(body), pick(r, []int{0, 7, 8, 15, 16, 23, 24}))]
		}
	}
	b := make([]byte, 20+options)
	b[0] = 0x40 | byte(5+options/4)
	b[1] = pick(r, []byte{0, 0xb8, 1, 3})
	be.PutUint16(b[2:], uint16(len(b)+len(body)))
	be.PutUint16(b[4:], pick(r, []uint16{0, 1, 0x1234}))
	be.PutUint16(b[6:], pick(r, []uint16{0, 0, 0, 0x4000, 0x2000, 0x2003, 3, 0x1fff}))
	b[8] = pick(r, []byte{0, 1, 64, 255})
	b[9] = proto
	be.PutUint16(b[10:], uint16(r.Uint32()))
	src, dst := pick(r, addrs4), pick(r, addrs4)
	copy(b[12:], src[:])
	copy(b[16:], dst[:])
	if one(r, 16) {
		be.PutUint16(b[2:], pick(r, []uint16{0, 1, 20, 27, 28, 40, 0xffff}))
	}
	return append(b, body...)
}

func ipv6(r *rand.Rand) []byte {
	next, body := transport(r, true)
	if one(r, 8) {
		body = body[:min(len(body), pick(r, []int{0, 3, 4, 7, 8, 12, 16, 19, 20, 24}))]
	}
	for n := pick(r, []int{0, 0, 0, 0, 1, 1, 2, 3, 8, 9, 31, 32, 33}); n > 0; n-- {
		next, body = extension(r, next, body)
	}
	b := make([]byte, 8, 40)
	be.PutUint32(b, 0x60000000|uint32(pick(r, []uint32{0, 0x0b800000, 0x12345, 0x03000001})))
	be.PutUint16(b[4:], uint16(len(body)))
	b[6], b[7] = next, pick(r, []byte{0, 1, 64, 255})
	b = append(append(b, pick(r, addrs6)...), pick(r, addrs6)...)
	if one(r, 16) {
		be.PutUint16(b[4:], pick(r, []uint16{0, 1, 8, 20, 0xffff}))
	}
	return append(b, body...)
}

// extension prepends an extension header.
func extension(r *rand.Rand, next byte, body []byte) (byte, []byte) {
	kind := pick(r, []byte{0, 43, 60, 44, 51})
	units := pick(r, []int{0, 0, 1, 2})
	h := noise(r, 8+8*units)
	h[1] = byte(units)
	switch kind {
	case 44:
		h = h[:8]
		h[1] = byte(r.IntN(2)) // reserved, not a length
		be.PutUint16(h[2:], pick(r, []uint16{0, 1, 0, 8, 0xfff9}))
	case 51:
		h = noise(r, 8+4*units)
		h[1] = byte(units)
	}
	h[0] = next
	return kind, append(h, body...)
}

func transport(r *rand.Rand, v6 bool) (proto byte, b []byte) {
	ports := be.AppendUint16(be.AppendUint16(nil, pick(r, ports)), pick(r, ports))
	switch r.IntN(12) {
	case 0, 1, 2, 3:
		b = append(ports, 0, 0, byte(r.Uint32()), byte(r.Uint32()))
		b = append(b, payload(r)...)
		be.PutUint16(b[4:], uint16(len(b)))
		if one(r, 6) { // a wrong length, or surplus bytes
			be.PutUint16(b[4:], pick(r, []uint16{0, 7, 8, 9, uint16(len(b) / 2), uint16(len(b) + 3), 0xffff}))
			b = append(b, pick(r, payloads)...)
		}
		return 17, b
	case 4, 5, 6, 7:
		return 6, tcp(r, ports)
	case 8:
		return 1, append([]byte{pick(r, []byte{8, 0, 3}), pick(r, []byte{0, 1}), 1, 2, 0x12, 0x34, 0, 7}, payload(r)...)
	case 9:
		return 58, append([]byte{pick(r, []byte{128, 129, 1}), pick(r, []byte{0, 1}), 1, 2, 0, 0, 0, 7}, payload(r)...)
	case 10:
		flags := pick(r, []byte{0, 0x20, 0xa0, 0x80})
		return 47, append([]byte{flags, 0, 0x08, 0}, append([]byte{0, 0, 0, 7, 0, 0, 0, 9}[:r.IntN(9)], payload(r)...)...)
	}
	if v6 && one(r, 2) {
		return 59, nil
	}
	return pick(r, []byte{132, 136, 2, 6, 17}), noise(r, r.IntN(24))
}

func tcp(r *rand.Rand, ports []byte) []byte {
	options := []byte{}
	for n := r.IntN(5); n > 0 && len(options) < 28; n-- {
		options = append(options, pick(r, []string{"\x02\x04\x05\xb4", "\x01", "\x03\x03\x07", "\x04\x02", "\x08\x0a\x00\x00\x00\x01\x00\x00\x00\x02", "\x02\x04\x02\x18", "\x00", "\x05\x0a" + zeros(8), "\x02\x01", "\x08\x03\x00", "\x1e\x63"})...)
	}
	for len(options)%4 != 0 {
		options = append(options, pick(r, []byte{0, 1}))
	}
	if one(r, 12) {
		options = make([]byte, 40)
		for i := range options {
			options[i] = 1
		}
		copy(options[r.IntN(37):], "\x02\x04\x05\xb4")
		copy(options[r.IntN(37):], "\x02\x04\x02\x18")
	}
	b := append(ports, 0, 0, 0, 1, 0, 0, 0, 2)
	b = append(b, byte(5+len(options)/4)<<4|byte(r.IntN(16)), pick(r, []byte{2, 0x12, 0x10, 0x18, 4, 0x11, 0xff, 0}), 0xfa, 0xf0, 1, 2, 0, 0)
	if one(r, 16) {
		b[12] = byte(r.IntN(16)) << 4
	}
	return append(append(b, options...), payload(r)...)
}

func payload(r *rand.Rand) []byte {
	switch r.IntN(8) {
	case 0, 1:
		b := []byte{0x12, 0x34, 1, 0, 0, pick(r, []byte{1, 1, 1, 0}), 0, 0, 0, 0, 0, 0}
		b = append(b, pick(r, questions)...)
		if one(r, 8) {
			for range r.IntN(36) {
				b = append(b, 1, 'a')
			}
			b = append(b, 0)
		}
		return append(b, 0, pick(r, []byte{1, 28, 255}), 0, 1)[:len(b)+r.IntN(5)]
	case 2:
		return noise(r, r.IntN(300))
	case 3:
		return append(noise(r, 200+r.IntN(100)), pick(r, payloads)...)
	}
	return append([]byte(pick(r, payloads)), pick(r, payloads)...)
}
