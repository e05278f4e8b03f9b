// SPDX-License-Identifier: Apache-2.0

package filters

import (
	"bytes"
	"slices"
)

// ask is a segment or datagram to a port of the host. A rule drops it, unless it has no rule.
type ask struct {
	name  string // of the rule
	proto byte
	port  uint16
	rule  string // of weir
	nft   string // the same rule for nftables
}

// asks are the ports probed by every shape. The ports without a rule show that a filter drops nothing else.
var asks = []ask{
	{"port", protoTCP, 23, "tcp.dstport == 23", "tcp dport 23"},
	{"flags", protoTCP, 2323, "tcp.dstport == 2323 and tcp.flags.syn and not tcp.flags.ack", "tcp dport 2323 tcp flags & (syn | ack) == syn"},
	{"option", protoTCP, 2324, "tcp.dstport == 2324 and tcp.options.mss_val < 536", "tcp dport 2324 tcp option maxseg size < 536"},
	{"udp", protoUDP, 53, "udp.dstport == 53", "udp dport 53"},
	{"", protoTCP, 80, "", ""},
	{"", protoUDP, 5353, "", ""},
}

// disguise is one packet or all its fragments: an ask in a shape.
type disguise struct {
	ask
	src, dst []byte // addresses, of 4 or 16 bytes
	sport    uint16
	id       uint32 // of its fragments
	segment  []byte // the transport header and its payload
}

// shape is a form of a packet to hide its ports from a filter.
type shape struct {
	name    string
	six     bool
	tags    []uint16 // VLAN numbers, outermost first
	options string   // of TCP, instead of one MSS
	flags   byte     // of TCP, instead of SYN
	offset  byte     // TCP's data offset, instead of the right one
	packets func(p *disguise) [][]byte
	inside  bool // the ports are within a tunnel: filters see the outermost header, and weir should match nftables
	blind   bool // the bytes are missing: packets outside all rules are dropped, too
	toSID   bool // the outer address is a segment identifier (SRv6)
}

const smallMSS = "\x02\x04\x01\x90"

var nops = func(n int) string { return string(bytes.Repeat([]byte{1}, n)) }

// evasionShapes returns all shapes.
func evasionShapes() []shape {
	return slices.Concat(shapes4(), shapes6(), shapesTCP(), shapesTagged(), shapesTunnel())
}

// one returns a shape of a single IPv4 packet.
func one(options string, frag uint16, change func(b []byte)) func(*disguise) [][]byte {
	return func(p *disguise) [][]byte {
		b := p.v4(options, frag, p.proto, p.segment)
		if change != nil {
			change(b)
			be.PutUint16(b[10:], 0)
			be.PutUint16(b[10:], checksum(b[:20+len(options)]))
		}
		return [][]byte{b}
	}
}

// cut4 returns a shape of fragments. at holds their first bytes, and order the order of sending, if any.
func cut4(options string, at []int, order ...int) func(*disguise) [][]byte {
	return func(p *disguise) [][]byte {
		var out [][]byte
		for i, from := range at {
			to, more := len(p.segment), uint16(0)
			if i < len(at)-1 {
				to, more = at[i+1], 0x2000
			}
			out = append(out, p.v4(options, more|uint16(from/8), p.proto, p.segment[from:to]))
		}
		return ordered(out, order)
	}
}

func ordered(packets [][]byte, order []int) [][]byte {
	if len(order) == 0 {
		return packets
	}
	var out [][]byte
	for _, i := range order {
		out = append(out, packets[i])
	}
	return out
}

func shapes4() []shape {
	return []shape{
		{name: "IPv4", packets: one("", 0, nil)},
		{name: "IPv4, 4 bytes of options", packets: one(nops(4), 0, nil)},
		{name: "IPv4, 40 bytes of options", packets: one(nops(40), 0, nil)},
		{name: "IPv4, time stamps", packets: one("\x44\x0c\x05\x00"+nops(8), 0, nil)},
		{name: "IPv4, reserved bit", packets: one("", 0x8000, nil)},
		{name: "IPv4, length within TCP", packets: one("", 0, func(b []byte) { be.PutUint16(b[2:], 34) })},
		{name: "IPv4, header behind the end", packets: one("", 0, func(b []byte) { be.PutUint16(b[2:], 20); b[0] = 0x46 }), blind: true},
		{name: "IPv4, first fragment of 8", packets: cut4("", []int{0, 8})},
		{name: "IPv4, first fragment of 16", packets: cut4("", []int{0, 16})},
		{name: "IPv4, first fragment of 24", packets: cut4("", []int{0, 24})},
		{name: "IPv4, first fragment of 8 with options", packets: cut4(nops(40), []int{0, 8})},
		{name: "IPv4, late first fragment of 8", packets: cut4("", []int{0, 8}, 1, 0)},
		{name: "IPv4, late first fragment of 16", packets: cut4("", []int{0, 16}, 1, 0)},
		{name: "IPv4, fragments of 8", packets: cut4("", []int{0, 8, 16, 24, 32})},
		{name: "IPv4, fragments of 8, last first", packets: cut4("", []int{0, 8, 16, 24, 32}, 4, 3, 2, 1, 0)},
		{name: "IPv4, first fragment twice", packets: cut4("", []int{0, 8, 16}, 0, 0, 1, 2)},
		{name: "IPv4, an empty first fragment", blind: true, packets: func(p *disguise) [][]byte {
			return [][]byte{p.v4("", 0x2000, p.proto, nil), p.v4("", 0x2000, p.proto, p.segment[:8]), p.v4("", 1, p.proto, p.segment[8:])}
		}},
		{name: "IPv4, overlapping fragments", packets: func(p *disguise) [][]byte {
			return [][]byte{p.v4("", 0x2000, p.proto, p.segment[:16]), p.v4("", 1, p.proto, p.segment[8:])}
		}},
		{name: "IPv4, another port below", packets: func(p *disguise) [][]byte {
			return [][]byte{p.v4("", 0x2000, p.proto, p.toPort(8080)[:8]), p.v4("", 0x2000, p.proto, p.segment[:16]), p.v4("", 2, p.proto, p.segment[16:])}
		}},
		{name: "IPv4, another port above", packets: func(p *disguise) [][]byte {
			return [][]byte{p.v4("", 2, p.proto, p.segment[16:]), p.v4("", 0x2000, p.proto, p.segment[:16]), p.v4("", 0x2000, p.proto, p.toPort(8080)[:16])}
		}},
		{name: "IPv4, AH", packets: func(p *disguise) [][]byte {
			return [][]byte{p.v4("", 0, headerAuth, append(authentication(p.proto), p.segment...))}
		}},
		{name: "IPv4, AH behind options", packets: func(p *disguise) [][]byte {
			return [][]byte{p.v4(nops(4), 0, headerAuth, append(authentication(p.proto), p.segment...))}
		}},
	}
}

// shapesTCP returns the shapes with a modified TCP header.
func shapesTCP() []shape {
	whole := one("", 0, nil)
	return []shape{
		{name: "TCP, no options", options: "-", packets: whole},
		{name: "TCP, 36 bytes before the MSS", options: nops(36) + smallMSS, packets: whole},
		{name: "TCP, an unknown option before the MSS", options: "\xfd\x08abcdef" + smallMSS, packets: whole},
		{name: "TCP, MSS twice", options: "\x02\x04\x05\xb4" + smallMSS, packets: whole},
		{name: "TCP, MSS behind the first fragment", options: nops(36) + smallMSS, packets: cut4("", []int{0, 24})},
		{name: "TCP, data offset of 4", offset: 4, packets: whole},
		{name: "TCP, data offset behind the end", offset: 15, packets: func(p *disguise) [][]byte {
			p.segment = p.segment[:min(len(p.segment), 44)]
			return whole(p)
		}},
		{name: "TCP, ECN and pushed", flags: 0xea, packets: whole},
	}
}

// authentication returns an AH (RFC 4302) with a check value of 12 bytes.
func authentication(next byte) []byte {
	return append([]byte{next, 4, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1}, make([]byte, 12)...)
}

func shapesTagged() []shape {
	whole := one("", 0, nil)
	return []shape{
		{name: "VLAN 0", tags: []uint16{0}, packets: whole},
		{name: "VLAN 0 twice", tags: []uint16{0, 0}, packets: whole},
		{name: "VLAN 0 three times", tags: []uint16{0, 0, 0}, packets: whole},
		{name: "VLAN 0 nine times, IPv6", tags: make([]uint16, 9), six: true, packets: chain6()},
		{name: "VLAN 0 forty times", tags: make([]uint16, 40), blind: true, packets: whole},
		{name: "VLAN 5", tags: []uint16{5}, packets: whole},
		{name: "VLAN 0, first fragment of 8", tags: []uint16{0}, packets: cut4("", []int{0, 8})},
	}
}
