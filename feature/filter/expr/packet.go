// SPDX-License-Identifier: Apache-2.0

package expr

import "encoding/binary"

// Layer is the first header of a packet's bytes.
type Layer uint8

// The layers.
const (
	Link    Layer = iota // an Ethernet header: XDP, tc
	Network              // an IP header: netfilter, sockets, devices without a link layer
)

// Packet is the view of a packet at a hook.
type Packet struct {
	Data  []byte
	Layer Layer
	// Missing is the number of bytes after Data missing from a capture, see [Env.EvalCut].
	Missing int
	// Tags are VLAN tags removed from the frame by the kernel or the device, outermost first. At
	// tc, one is visible beside the frame.
	Tags []Tag
}

// Tag is a VLAN tag.
type Tag struct {
	Protocol uint16 // the tag's EtherType: 0x8100 or 0x88a8
	TCI      uint16 // priority, DEI and VLAN ID
}

// MaxExtensions bounds the walk over IPv6 extension headers. A transport header after more of them
// is unreadable.
const MaxExtensions = 32

// maxReadTags is the number of VLAN tags with fields. Up to MaxTags more are walked, because the
// kernel removes any number of tags with VLAN ID 0. After more tags nothing of the packet is known,
// not even its network protocol.
const (
	maxReadTags = 2
	MaxTags     = 32
)

var be = binary.BigEndian

// layers is a dissected packet: slices of its headers, nil for absent ones.
type layers struct {
	eth       []byte // 14 bytes
	ethType   uint16 // as stored after the addresses, or as stored without Tags
	tags      []uint16
	etypes    []uint16 // type after each tag
	ip4       []byte   // 20 bytes
	ip6       []byte   // 40 bytes
	hopOpts   bool
	dstOpts   bool
	routing   bool
	frag      []byte // 8 bytes
	tcp       []byte // 20 bytes, plus the available options
	tcpHead   []byte // the first 8 to 20 bytes of the header
	udp       []byte // 8 bytes
	icmp      []byte // 8 bytes
	icmp6     []byte
	gre       []byte // 4 bytes, plus the rest of the packet
	payload   []byte
	noPayload bool

	// For a truncated packet of a capture:
	cut       bool
	captured  int    // bytes present, of size
	size      int    // the capacity of the packet's array
	lost      part   // undissectable part
	etherType uint16 // type after the link layer, 0: unknown
	proto     int    // protocol of a lost transport header, -1: unknown

	unreadable bool // the transport header is incomplete
	have       int  // readable bytes of an unreadable header: 0, or 8, 16 or 20 of TCP; HaveLink: not even IP
}

// dissect dissects a packet. Truncated or malformed headers, and all headers after them, are
// absent.
func dissect(p *Packet) *layers {
	l := &layers{noPayload: true}
	b := p.Data
	if p.Missing > 0 {
		b = append(make([]byte, 0, len(b)+p.Missing), b...)[:len(b)+p.Missing]
		l.cut, l.captured, l.size = true, len(p.Data), cap(b)
	}
	proto := uint16(0)
	if p.Layer == Link {
		if len(b) < 14 {
			return l
		}
		if !l.sees(b, 14) {
			l.lost = lostTags
			return l
		}
		l.eth = b[:14]
		proto, b = l.vlan(p.Tags, b[12:])
	} else if len(b) > 0 {
		if !l.sees(b, 1) {
			l.lost = lostNetwork
			return l
		}
		proto = map[byte]uint16{4: etherIPv4, 6: etherIPv6}[b[0]>>4]
	}
	l.etherType = proto
	switch proto {
	case etherIPv4:
		l.ipv4(b)
	case etherIPv6:
		l.ipv6(b)
	}
	return l
}

const (
	etherIPv4 = 0x0800
	etherIPv6 = 0x86dd
	etherVLAN = 0x8100 // IEEE 802.1Q
	etherQinQ = 0x88a8 // 802.1ad
)

// vlan reads the tags and the type after them. b begins with the EtherType.
func (l *layers) vlan(out []Tag, b []byte) (proto uint16, rest []byte) {
	proto, b = be.Uint16(b), b[2:]
	for i, t := range out {
		if i == 0 {
			l.ethType = t.Protocol
		}
		if i > 0 && i <= maxReadTags {
			l.etypes = append(l.etypes, t.Protocol)
		}
		if i < maxReadTags {
			l.tags = append(l.tags, t.TCI)
		}
	}
	if len(out) == 0 {
		l.ethType = proto
	} else if len(out) <= maxReadTags {
		l.etypes = append(l.etypes, proto)
	}
	for len(l.tags) < maxReadTags && (proto == etherVLAN || proto == etherQinQ) {
		if len(b) < 4 {
			return 0, nil
		}
		if !l.sees(b, 4) {
			l.lost = lostTags
			return 0, nil
		}
		l.tags = append(l.tags, be.Uint16(b))
		proto = be.Uint16(b[2:])
		l.etypes = append(l.etypes, proto)
		b = b[4:]
	}
	for n := 0; proto == etherVLAN || proto == etherQinQ; n++ {
		if n == MaxTags {
			l.unreadable, l.have = true, HaveLink
			return 0, nil
		}
		if len(b) < 4 {
			return 0, nil
		}
		if !l.sees(b, 4) {
			l.lost = lostTags
			return 0, nil
		}
		proto, b = be.Uint16(b[2:]), b[4:]
	}
	return proto, b
}

// until cuts off bytes after the packet's end: Ethernet padding, or surplus bytes after a UDP
// datagram. Linux writes length 0 in merged packets above 64 KiB: these extend to the end.
func until(b []byte, length int) []byte {
	if length != 0 && length < len(b) {
		return b[:length]
	}
	return b
}

// ipv4 dissects an IPv4 packet (RFC 791).
func (l *layers) ipv4(b []byte) {
	if len(b) >= 20 && !l.sees(b, 1) {
		l.lost = lostNetwork
		return
	}
	if len(b) < 20 || b[0]>>4 != 4 || b[0]&15 < 5 {
		return
	}
	l.ip4 = b[:20]
	if !l.sees(b, ends[IP4Proto]) {
		l.lose(lostTransport, -1)
		return
	}
	b = until(b, int(be.Uint16(b[2:])))
	header := int(l.ip4[0]&15) * 4
	if be.Uint16(l.ip4[6:])&0x1fff != 0 {
		return // a later fragment: no transport header here
	}
	proto, b := l.ip4[9], b[min(header, len(b)):]
	if proto == nextAH { // RFC 4302; a second AH is unreadable
		if len(b) < 8 || l.sees(b, 1) && b[0] == nextAH {
			l.unreadable = true
			return
		}
		if !l.sees(b, 2) {
			l.lose(lostTransport, -1)
			return
		}
		proto, b = b[0], b[min(8+4*int(b[1]), len(b)):]
	}
	l.transport(proto, b, false)
}

// The walked IPv6 next headers (IANA).
const (
	nextHopOpts  = 0
	nextRouting  = 43
	nextFragment = 44
	nextAH       = 51
	nextDstOpts  = 60
)

// ipv6 dissects an IPv6 packet (RFC 8200).
func (l *layers) ipv6(b []byte) {
	if len(b) >= 40 && !l.sees(b, 1) {
		l.lost = lostNetwork
		return
	}
	if len(b) < 40 || b[0]>>4 != 6 {
		return
	}
	l.ip6 = b[:40]
	if !l.sees(b, ends[IP6Next]) {
		l.lose(lostTransport, -1)
		return
	}
	plen := int(be.Uint16(b[4:]))
	if plen != 0 {
		b = until(b, 40+plen)
	}
	next, b := l.ip6[6], b[40:]
	for range MaxExtensions {
		switch next {
		case nextHopOpts, nextRouting, nextDstOpts, nextFragment, nextAH:
		default:
			l.transport(next, b, true)
			return
		}
		if len(b) < 8 {
			l.unreadable = true
			return
		}
		if !l.sees(b, 8) {
			l.lose(lostTransport, -1)
			return
		}
		size := 8 + 8*int(b[1])
		switch next {
		case nextHopOpts:
			l.hopOpts = true
		case nextDstOpts:
			l.dstOpts = true
		case nextRouting:
			l.routing = true
		case nextAH:
			size = 8 + 4*int(b[1])
		case nextFragment:
			size = 8
			l.frag = b[:8]
			if be.Uint16(b[2:])>>3 != 0 {
				return // a later fragment
			}
		}
		if len(b) < size {
			next, b = b[0], nil
			continue
		}
		next, b = b[0], b[size:]
	}
	switch next {
	case nextHopOpts, nextRouting, nextDstOpts, nextFragment, nextAH:
		l.unreadable = true
	default:
		l.transport(next, b, true)
	}
}

// transport dissects the transport header. b ends at the IP packet's end.
func (l *layers) transport(proto byte, b []byte, ipv6 bool) {
	carry := func(header int) {
		l.payload, l.noPayload = b[header:], false
	}
	if len(b) >= wholeHeader(proto) && !l.sees(b, begun) {
		l.lose(lostTransport, int(proto))
		return
	}
	switch {
	case proto == 6 && len(b) >= 20: // RFC 9293
		header := int(b[12]>>4) * 4
		l.tcp, l.tcpHead = b[:20], b[:20]
		if !l.sees(b, ends[TCPHdrLen]) {
			l.lose(lostPayload, int(proto))
		} else if header >= 20 && len(b) >= header {
			l.tcp = b[:header]
			carry(header)
		} else {
			l.unreadable, l.have = true, 20
		}
	case proto == 17 && len(b) >= 8: // RFC 768
		l.udp = b[:8]
		if !l.sees(b, ends[UDPLength]) {
			l.lose(lostPayload, int(proto))
			return
		}
		if n := int(be.Uint16(b[4:])); n >= 8 { // as sockets receive it; a smaller value is invalid, or belongs to a jumbogram (RFC 2675)
			b = until(b, n)
		}
		carry(8)
	case proto == 1 && !ipv6 && len(b) >= 8: // RFC 792
		l.icmp = b[:8]
		carry(8)
	case proto == 58 && ipv6 && len(b) >= 8: // RFC 4443
		l.icmp6 = b[:8]
		carry(8)
	case proto == 47 && len(b) >= 4: // RFC 2784, 2890
		l.gre = b
	case proto == 6:
		l.unreadable, l.have = true, len(b)/8*8
		l.tcpHead = b[:l.have]
	case proto == 17, proto == 1 && !ipv6, proto == 58 && ipv6, proto == 47:
		l.unreadable = true
	}
}

// lose records the undissectable part of a truncated packet.
func (l *layers) lose(what part, proto int) { l.lost, l.proto = what, proto }

// option returns the last TCP option with this kind and total size (RFC 9293, 3.1). Receivers use
// the last one, too.
func (l *layers) option(kind byte, size int) (found []byte) {
	if len(l.tcp) < 20 || !l.sees(l.tcp, len(l.tcp)) {
		return nil
	}
	b := l.tcp[20:]
	for range MaxOptions {
		if len(b) == 0 || b[0] == 0 {
			break
		}
		if b[0] == 1 {
			b = b[1:]
			continue
		}
		if len(b) < 2 || b[1] < 2 || int(b[1]) > len(b) {
			break
		}
		if b[0] == kind && int(b[1]) == size {
			found = b[:size]
		}
		b = b[b[1]:]
	}
	return found
}

// MaxOptions is the maximum number of TCP options in a header, no-operations included.
const MaxOptions = 40
