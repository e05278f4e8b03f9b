// SPDX-License-Identifier: Apache-2.0

package filters

import (
	"bytes"
	"slices"
)

// v4 returns an IPv4 packet of the probe, with a fragment field and its number.
func (p *disguise) v4(options string, frag uint16, proto byte, body []byte) []byte {
	return ip4(p.src, p.dst, options, frag, uint16(p.id), proto, body)
}

func ip4(src, dst []byte, options string, frag, id uint16, proto byte, body []byte) []byte {
	b := make([]byte, 20, 20+len(options)+len(body))
	b[0], b[8], b[9] = 0x40|byte(5+len(options)/4), 64, proto
	be.PutUint16(b[2:], uint16(20+len(options)+len(body)))
	be.PutUint16(b[4:], id)
	be.PutUint16(b[6:], frag)
	copy(b[12:], src)
	copy(b[16:], dst)
	b = append(b, options...)
	be.PutUint16(b[10:], checksum(b))
	return append(b, body...)
}

// v6 returns an IPv6 packet of the probe.
func (p *disguise) v6(next byte, body []byte) []byte { return ip6(p.src, p.dst, next, body) }

func ip6(src, dst []byte, next byte, body []byte) []byte {
	b := be.AppendUint16([]byte{0x60, 0, 0, 0}, uint16(len(body)))
	return slices.Concat(b, []byte{next, 64}, src, dst, body)
}

// build creates the segment: a SYN, or a datagram.
func (p *disguise) build(s *shape) {
	between := be.AppendUint16(be.AppendUint16(nil, p.sport), p.port)
	data := bytes.Repeat([]byte("weir"), 8)
	if p.proto == protoUDP {
		p.segment = slices.Concat(be.AppendUint16(between, uint16(8+len(data))), []byte{0, 0}, data)
		p.sum(6)
		return
	}
	options := s.options
	switch options {
	case "":
		options = smallMSS
	case "-":
		options = ""
	}
	offset, flags := s.offset, s.flags
	if offset == 0 {
		offset = byte(5 + len(options)/4)
	}
	if flags == 0 {
		flags = 2
	}
	head := append(between, 0, 0, 0, 1, 0, 0, 0, 0, offset<<4, flags&^0x10, 0xfa, 0xf0, 0, 0, 0, 0)
	p.segment = slices.Concat(head, []byte(options), data)
	p.sum(16)
}

// sum writes the checksum, over the addresses of the segment's own ends.
func (p *disguise) sum(at int) {
	src, dst := p.ends()
	be.PutUint16(p.segment[at:], 0)
	all := slices.Concat(src, dst, []byte{0, p.proto}, be.AppendUint16(nil, uint16(len(p.segment))), p.segment)
	be.PutUint16(p.segment[at:], checksum(all))
}

// ends returns the addresses of the segment. For a packet to a segment identifier they are the inner
// addresses.
func (p *disguise) ends() (src, dst []byte) {
	if bytes.Equal(p.dst, sid[:]) {
		return p.src, host6[:]
	}
	return p.src, p.dst
}

// toPort returns the segment with another port.
func (p *disguise) toPort(port uint16) []byte {
	b := slices.Clone(p.segment)
	be.PutUint16(b[2:], port)
	return b
}

// inner4 and inner6 return the packet within a tunnel. Addresses of the other family are derived from the
// outer ones.
func (p *disguise) inner4() []byte {
	if len(p.src) == 4 {
		return ip4(p.src, p.dst, "", 0, 1, p.proto, p.segment)
	}
	return ip4(p.src[12:], host4[:], "", 0, 1, p.proto, p.segment)
}

func (p *disguise) inner6() []byte {
	src, dst := p.ends()
	if len(src) == 4 {
		src, dst = append(make([]byte, 12), src...), host6[:]
	}
	return ip6(src, dst, p.proto, p.segment)
}

// vxlan returns a datagram with a frame in it (RFC 7348).
func (p *disguise) vxlan() []byte {
	frame := append([]byte{2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x08, 0x00}, p.inner4()...)
	head := be.AppendUint16(be.AppendUint16(nil, p.sport), 4789)
	head = be.AppendUint16(head, uint16(16+len(frame)))
	return slices.Concat(head, []byte{0, 0}, []byte{8, 0, 0, 0, 0, 0, 7, 0}, frame)
}
