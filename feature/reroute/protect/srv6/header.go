// SPDX-License-Identifier: Apache-2.0

// Package srv6 builds the headers of packets sent by segments (RFC 8754, RFC 8986).
package srv6

import (
	"encoding/binary"
	"net/netip"
	"slices"
)

// Lengths of headers, in bytes, and protocol numbers.
const (
	IPv6Length    = 40
	HeaderLength  = 8 // of a routing header without segments: RFC 8754 section 2
	SegmentLength = 16
	Room          = 192 // REROUTE_HEADER
	outerHops     = 64

	NextIPv4    = 4
	NextIPv6    = 41
	NextRouting = 43
	srhType     = 4
)

// Encap returns the headers to prepend to a packet. An IPv6 header leads to the first segment. If there are more, a
// routing header lists the others, reduced as H.Encaps.Red of RFC 8986 section 5.2. The program fills in traffic
// class, flow label and payload length.
func Encap(source netip.Addr, segments []netip.Addr, inner uint8) (h [Room]byte, length int) {
	next := inner
	if len(segments) > 1 {
		next = NextRouting
		length = putSRH(h[IPv6Length:], inner, segments[1:])
	}
	putIPv6(h[:], source, segments[0], next)
	return h, IPv6Length + length
}

// Inline returns a packet's IPv6 header with a routing header behind it. The first segment is the destination. The
// program writes the packet's own destination to the last segment, the first in memory. length is the growth of the
// packet.
func Inline(segments []netip.Addr) (h [Room]byte, length int) {
	rest := append(slices.Clone(segments[1:]), netip.IPv6Unspecified())
	length = putSRH(h[IPv6Length:], 0, rest)
	putIPv6(h[:], netip.IPv6Unspecified(), segments[0], NextRouting)
	return h, length
}

func putIPv6(h []byte, from, to netip.Addr, next uint8) {
	binary.BigEndian.PutUint32(h, 6<<28)
	h[6], h[7] = next, outerHops
	copy(h[8:], from.AsSlice())
	copy(h[24:], to.AsSlice())
}

// putSRH writes a segment routing header with the remaining segments, in reverse order of the visits, and returns its
// length (RFC 8754 section 2). A reduced header omits the first segment, so segments left equals the length of the
// list.
func putSRH(h []byte, next uint8, left []netip.Addr) int {
	h[0], h[1], h[2], h[3], h[4] = next, byte(2*len(left)), srhType, byte(len(left)), byte(len(left)-1)
	for i, s := range left {
		copy(h[HeaderLength+SegmentLength*(len(left)-1-i):], s.AsSlice())
	}
	return HeaderLength + SegmentLength*len(left)
}
