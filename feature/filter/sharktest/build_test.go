// SPDX-License-Identifier: Apache-2.0

package sharktest

import (
	"encoding/binary"
	"strings"
)

var be = binary.BigEndian

// packet is one packet of the generated capture. Pairs refer to its label if the tools may differ.
type packet struct {
	label string
	data  []byte // an Ethernet frame
	wire  int    // original length, if truncated by the capture
}

// Addresses of the outermost headers. Packets inside tunnels and ICMP errors have others. A term
// about a value then differs from Wireshark only in pairs about this difference.
var (
	client4, server4 = "\x0a\x01\x02\x03", "\xc0\x00\x02\x01"                                                   // 10.1.2.3, 192.0.2.1
	client6, server6 = "\x20\x01\x0d\xb8" + zeros(11) + "\x03", "\x20\x01\x0d\xb8\x00\x01" + zeros(9) + "\x01"  // 2001:db8::3, 2001:db8:1::1
	inner4a, inner4b = "\xc6\x33\x64\x01", "\xc6\x33\x64\x02"                                                   // 198.51.100.1, .2
	inner6a, inner6b = "\x20\x01\x0d\xb8\xff" + zeros(10) + "\x01", "\x20\x01\x0d\xb8\xff" + zeros(10) + "\x02" // 2001:db8:ff00::1, ::2
	clientMAC        = "\x02\x00\x00\x00\x00\x01"
	serverMAC        = "\x02\x00\x00\x00\x00\x02"
)

func zeros(n int) string { return strings.Repeat("\x00", n) }

// edit changes a header before its checksum is computed.
type edit func(h []byte)

func put8(at int, v byte) edit    { return func(h []byte) { h[at] = v } }
func put16(at int, v uint16) edit { return func(h []byte) { be.PutUint16(h[at:], v) } }
func put32(at int, v uint32) edit { return func(h []byte) { be.PutUint32(h[at:], v) } }

func addresses(at int, src, dst string) edit {
	return func(h []byte) { copy(h[at:], src+dst) }
}

func frame(etherType uint16, body []byte) []byte {
	return append(be.AppendUint16([]byte(serverMAC+clientMAC), etherType), body...)
}

// tagged inserts VLAN tags, each an EtherType and a TCI, into a frame.
func tagged(f []byte, tags ...uint16) []byte {
	out := []byte(string(f[:12]))
	for _, t := range tags {
		out = be.AppendUint16(out, t)
	}
	return append(out, f[12:]...)
}

func v4(proto byte, body []byte, edits ...edit) []byte { return v4opt("", proto, body, edits...) }

func v4opt(options string, proto byte, body []byte, edits ...edit) []byte {
	h := []byte("\x45\x00\x00\x00\x12\x34\x00\x00\x40\x00\x00\x00" + client4 + server4 + options)
	h[0], h[9] = byte(0x40|len(h)/4), proto
	be.PutUint16(h[2:], uint16(len(h)+len(body)))
	for _, e := range edits {
		e(h)
	}
	be.PutUint16(h[10:], checksum(h))
	return append(h, body...)
}

func checksum(b []byte) uint16 {
	sum := uint32(0)
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(be.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

func v6(next byte, body []byte, edits ...edit) []byte {
	h := []byte("\x60\x00\x00\x00\x00\x00\x00\x40" + client6 + server6)
	be.PutUint16(h[4:], uint16(len(body)))
	h[6] = next
	for _, e := range edits {
		e(h)
	}
	return append(h, body...)
}

// extension returns an IPv6 extension header: next header, length in units of 8 bytes without the
// first, and the rest.
func extension(next, length byte, rest string, body []byte) []byte {
	return append(append([]byte{next, length}, rest...), body...)
}

func udp(src, dst uint16, payload string, edits ...edit) []byte {
	h := make([]byte, 8)
	be.PutUint16(h, src)
	be.PutUint16(h[2:], dst)
	be.PutUint16(h[4:], uint16(8+len(payload)))
	be.PutUint16(h[6:], 0xbeef)
	for _, e := range edits {
		e(h)
	}
	return append(h, payload...)
}

// TCP flags.
const (
	fin = 1 << iota
	syn
	rst
	psh
	ack
	urg
	ece
	cwr
	ae // accurate ECN, formerly NS (RFC 3540)
)

func tcp(src, dst, flags uint16, options, payload string, edits ...edit) []byte {
	for len(options)%4 != 0 {
		options += "\x00"
	}
	h := make([]byte, 20, 20+len(options)+len(payload))
	be.PutUint16(h, src)
	be.PutUint16(h[2:], dst)
	be.PutUint32(h[4:], 1000)
	be.PutUint32(h[8:], 2000)
	be.PutUint16(h[12:], uint16(5+len(options)/4)<<12|flags)
	be.PutUint16(h[14:], 0xfaf0)
	be.PutUint16(h[16:], 0xcafe)
	for _, e := range edits {
		e(h)
	}
	return append(append(h, options...), payload...)
}

// question returns a DNS query with one question. name is in wire format.
func question(name string, kind uint16) string {
	return "\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00" + name + string(be.AppendUint16(nil, kind)) + "\x00\x01"
}

func sip(method string) string {
	return method + " sip:bob@example.com SIP/2.0\r\nVia: SIP/2.0/UDP 10.1.2.3\r\nCSeq: 1 " + method + "\r\nContent-Length: 0\r\n\r\n"
}
