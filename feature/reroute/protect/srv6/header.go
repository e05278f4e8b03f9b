// SPDX-License-Identifier: Apache-2.0

// Package srv6 builds the headers of packets that go by segments (RFC 8754, RFC 8986).
package srv6

import (
	"encoding/binary"
	"net/netip"
	"slices"
)

// Parts of headers, in bytes, and their numbers.
const (
	IPv6Length    = 40
	HeaderLength  = 8 // of a routing header without its segments: RFC 8754, 2
	SegmentLength = 16
	Room          = 192 // REROUTE_HEADER
	outerHops     = 64

	NextIPv4    = 4
	NextIPv6    = 41
	NextRouting = 43
	srhType     = 4
)

// Encap is what goes before a packet: an IPv6 header to the first segment, and with more of them a routing header of the
// others, reduced as H.Encaps.Red of RFC 8986, 5.2. Traffic class, flow label and length are the program's to fill in.
func Encap(source netip.Addr, segments []netip.Addr, inner uint8) (h [Room]byte, length int) {
	next := inner
	if len(segments) > 1 {
		next = NextRouting
		length = putSRH(h[IPv6Length:], inner, segments[1:])
	}
	putIPv6(h[:], source, segments[0], next)
	return h, IPv6Length + length
}

// Inline is a packet's own header with the routing header behind it. The first segment is the destination; the last place
// in the list, the first in memory, is that of the packet's own destination, which the program fills in. length is what the
// packet grows by.
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

// putSRH writes a segment routing header of the segments that are left, and says how long it is: RFC 8754, 2. Its list is in
// the order opposite to that in which segments are visited. Reduced, the list lacks the first one, so that as many are left as
// it has.
func putSRH(h []byte, next uint8, left []netip.Addr) int {
	h[0], h[1], h[2], h[3], h[4] = next, byte(2*len(left)), srhType, byte(len(left)), byte(len(left)-1)
	for i, s := range left {
		copy(h[HeaderLength+SegmentLength*(len(left)-1-i):], s.AsSlice())
	}
	return HeaderLength + SegmentLength*len(left)
}
