// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"github.com/cilium/ebpf/asm"

	"github.com/weir-project/weir/feature/filter/compile/code"
	"github.com/weir-project/weir/feature/filter/expr"
)

// A program dissects a packet once and copies its headers to the stack. All rules read this image. A word of the
// image has the absence bits, one for each layer, set if the packet lacks it. During dissection they are in R7.
//
// Absence bits, offsets and lengths are stored at 4-byte addresses not divisible by 8, where the verifier does not
// track values. Otherwise it would verify the rules once for each kind of packet.

// Absence bits.
const (
	noEth uint32 = 1 << iota
	noTag0
	noTag1
	noIP4
	noIP6
	noTCP
	noUDP
	noICMP
	noICMP6
	noGRE
	noPayload
	noHopOpts
	noDstOpts
	noRouting
	noFrag
	noMSS
	noWScale
	noSackPerm
	noTimestamps
	noGREKey
	noQuestion // the DNS message announces at least one question
	noQType
	noPorts // the first 8 bytes of TCP, with the ports
	noFlags // the first 16 bytes of TCP
	noUnreadable
	noBlank   // the whole transport header is unknown
	noIP      // the IP header is unknown too
	noShort16 // the first 16 bytes of TCP are unknown
	noShort20 // the first 20 bytes of TCP are unknown
)

// Offsets in the image, from R8. Ethernet and IP header are adjacent, as in the packet.
const (
	imgEth    = 2  // 14 bytes
	imgIP     = 16 // 20 or 40 bytes
	imgTag0   = 56 // TCI and the following EtherType
	imgLen    = 60 // bytes visible to the hook, u32
	imgTag1   = 64
	imgL4     = 68  // 20 bytes
	imgFrag   = 88  // the second 16 bits of a fragment header
	imgQType  = 90  //
	imgEnd    = 92  // end of the IP packet, or of its UDP datagram, u32
	imgWScale = 96  // a byte, and one more for writes by copy
	imgMSS    = 98  //
	imgL3     = 100 // start of the IP packet
	imgAt     = 108 // start of the transport header
	imgBody   = 116 // start of the payload
	imgAbsent = 124 // absence bits
	imgTS     = 128 // TSval, TSecr
	imgKey    = 136 // GRE key
	imgSpare  = 140 // temporary value
	imgAt2    = 148
	imgLinear = 156 // linear bytes from the IP header on, for reads through struct sk_buff
	imgTurn   = 164 // loop counter
	imgSaved  = 172 // an offset during the creation of a dynptr
	imgMaybe  = 180 // subset of imgAbsent independent of unreadable bytes
	imgSize   = 184
)

// Stack layout of a function, from the frame pointer downwards. The scratch area is lowest and as small as the rules
// allow, because the verifier copies the stack at every branch.
const (
	stackBase  = code.StackDyn - 8 // address of the IP header minus scratchAt
	stackSaved = stackBase - 8     // a saved register
	stackImage = stackSaved - 8 - imgSize

	leastScratch = 8  // headers, or a byte of payload
	maxScratched = 88 // literals or keys
)

// scratchSize returns the size of the scratch area: loads without a place in the image write there.
func scratchSize(rules []Rule, p *plan, h Hook) int16 {
	if len(p.groups) > 0 {
		return maxScratched
	}
	size := int16(leastScratch)
	for _, r := range rules {
		expr.Walk(r.Match.Root, func(n expr.Node) {
			switch n.(type) {
			case *expr.Contains, *expr.Matches, *expr.Rate:
				size = maxScratched
			}
			if h != XDP { // XDP compares bytes in the packet itself
				size = max(size, int16(roundUp(min(longest(n), atOnce), 8)))
			}
		})
	}
	return size
}

// longest returns the maximum number of bytes loaded by a comparison. A DNS name has two more in a packet, and a SIP
// method a trailing space.
func longest(n expr.Node) (most int) {
	var vs []expr.Value
	switch n := n.(type) {
	case *expr.Compare:
		vs = []expr.Value{n.V}
	case *expr.In:
		vs = n.Set
	}
	for _, v := range vs {
		if len(v.Bytes) > 0 {
			most = max(most, len(v.Bytes)+2)
		}
	}
	return most
}

// location is the position of a field in the image.
type location struct {
	absent uint32 // the field is absent if any of these bits is set
	off    int16
	size   asm.Size
	shift  uint8  // right shift of the number in network byte order,
	mask   uint32 // then a mask (0: all bits),
	times  uint8  // then a left shift
}

func at(absent uint32, off int16, size asm.Size) location {
	return location{absent: absent, off: off, size: size}
}

func (p location) bits(shift uint8, mask uint32) location {
	p.shift, p.mask = shift, mask
	return p
}

// locations has the position of each numeric field. Addresses and MACs have the offset of their first byte.
var locations = [256]location{
	expr.EthDst: at(noEth, imgEth, 0), expr.EthSrc: at(noEth, imgEth+6, 0), expr.EthType: at(noEth, imgEth+12, asm.Half),
	expr.VlanID0: at(noTag0, imgTag0, asm.Half).bits(0, 0xfff), expr.VlanID1: at(noTag1, imgTag1, asm.Half).bits(0, 0xfff),
	expr.VlanPriority0: at(noTag0, imgTag0, asm.Byte).bits(5, 0), expr.VlanPriority1: at(noTag1, imgTag1, asm.Byte).bits(5, 0),
	expr.VlanDEI0: at(noTag0, imgTag0, asm.Byte).bits(4, 1), expr.VlanDEI1: at(noTag1, imgTag1, asm.Byte).bits(4, 1),
	expr.VlanEtype0: at(noTag0, imgTag0+2, asm.Half), expr.VlanEtype1: at(noTag1, imgTag1+2, asm.Half),

	expr.IP4Version: at(noIP4, imgIP, asm.Byte).bits(4, 0), expr.IP4HdrLen: {absent: noIP4, off: imgIP, size: asm.Byte, mask: 15, times: 2},
	expr.IP4DSCP: at(noIP4, imgIP+1, asm.Byte).bits(2, 0), expr.IP4ECN: at(noIP4, imgIP+1, asm.Byte).bits(0, 3),
	expr.IP4Len: at(noIP4, imgIP+2, asm.Half), expr.IP4ID: at(noIP4, imgIP+4, asm.Half),
	expr.IP4DF: at(noIP4, imgIP+6, asm.Byte).bits(6, 1), expr.IP4MF: at(noIP4, imgIP+6, asm.Byte).bits(5, 1),
	expr.IP4FragOffset: {absent: noIP4, off: imgIP + 6, size: asm.Half, mask: 0x1fff, times: 3},
	expr.IP4TTL:        at(noIP4, imgIP+8, asm.Byte), expr.IP4Proto: at(noIP4, imgIP+9, asm.Byte), expr.IP4Checksum: at(noIP4, imgIP+10, asm.Half),
	expr.IP4Src: at(noIP4, imgIP+12, asm.Word), expr.IP4Dst: at(noIP4, imgIP+16, asm.Word),

	expr.IP6DSCP: at(noIP6, imgIP, asm.Half).bits(6, 0x3f), expr.IP6ECN: at(noIP6, imgIP, asm.Half).bits(4, 3),
	expr.IP6Flow: at(noIP6, imgIP, asm.Word).bits(0, 0xfffff), expr.IP6Plen: at(noIP6, imgIP+4, asm.Half),
	expr.IP6Next: at(noIP6, imgIP+6, asm.Byte), expr.IP6Hlim: at(noIP6, imgIP+7, asm.Byte),
	expr.IP6Src: at(noIP6, imgIP+8, 0), expr.IP6Dst: at(noIP6, imgIP+24, 0),
	expr.IP6FragOffset: at(noFrag, imgFrag, asm.Half).bits(3, 0), expr.IP6FragMore: at(noFrag, imgFrag+1, asm.Byte).bits(0, 1),

	expr.TCPSrcPort: at(noPorts, imgL4, asm.Half), expr.TCPDstPort: at(noPorts, imgL4+2, asm.Half),
	expr.TCPSeq: at(noPorts, imgL4+4, asm.Word), expr.TCPAck: at(noFlags, imgL4+8, asm.Word),
	expr.TCPHdrLen: {absent: noFlags, off: imgL4 + 12, size: asm.Byte, shift: 4, times: 2}, expr.TCPFlags: at(noFlags, imgL4+12, asm.Half).bits(0, 0xfff),
	expr.TCPFin: flag(0), expr.TCPSyn: flag(1), expr.TCPReset: flag(2), expr.TCPPush: flag(3),
	expr.TCPAckFlag: flag(4), expr.TCPUrg: flag(5), expr.TCPEce: flag(6), expr.TCPCwr: flag(7),
	expr.TCPWindow: at(noFlags, imgL4+14, asm.Half), expr.TCPChecksum: at(noTCP, imgL4+16, asm.Half), expr.TCPUrgent: at(noTCP, imgL4+18, asm.Half),
	expr.TCPMSS: at(noMSS, imgMSS, asm.Half), expr.TCPWScale: at(noWScale, imgWScale, asm.Byte),
	expr.TCPTSVal: at(noTimestamps, imgTS, asm.Word), expr.TCPTSEcr: at(noTimestamps, imgTS+4, asm.Word),

	expr.UDPSrcPort: at(noUDP, imgL4, asm.Half), expr.UDPDstPort: at(noUDP, imgL4+2, asm.Half),
	expr.UDPLength: at(noUDP, imgL4+4, asm.Half), expr.UDPChecksum: at(noUDP, imgL4+6, asm.Half),

	expr.ICMPType: at(noICMP, imgL4, asm.Byte), expr.ICMPCode: at(noICMP, imgL4+1, asm.Byte), expr.ICMPChecksum: at(noICMP, imgL4+2, asm.Half),
	expr.ICMPIdent: at(noICMP, imgL4+4, asm.Half), expr.ICMPSeq: at(noICMP, imgL4+6, asm.Half),
	expr.ICMP6Type: at(noICMP6, imgL4, asm.Byte), expr.ICMP6Code: at(noICMP6, imgL4+1, asm.Byte), expr.ICMP6Checksum: at(noICMP6, imgL4+2, asm.Half),
	expr.GREFlags: at(noGRE, imgL4, asm.Half), expr.GREProto: at(noGRE, imgL4+2, asm.Half), expr.GREKey: at(noGREKey, imgKey, asm.Word),
	expr.DNSType: at(noQType, imgQType, asm.Half),

	// Fields without a value: present or absent.
	expr.Eth: {absent: noEth}, expr.Vlan: {absent: noTag0}, expr.IP4: {absent: noIP4}, expr.IP6: {absent: noIP6},
	expr.IP6HopOpts: {absent: noHopOpts}, expr.IP6DstOpts: {absent: noDstOpts}, expr.IP6Routing: {absent: noRouting}, expr.IP6Frag: {absent: noFrag},
	expr.TCP: {absent: noTCP}, expr.UDP: {absent: noUDP}, expr.ICMP: {absent: noICMP}, expr.ICMP6: {absent: noICMP6}, expr.GRE: {absent: noGRE},
	expr.DNSName: {absent: noQuestion}, expr.TCPSackPerm: {absent: noSackPerm}, expr.Payload: {absent: noPayload}, expr.TCPLen: {absent: noTCP | noPayload},
	expr.TransportUnreadable: {absent: noUnreadable},
}

func flag(bit uint8) location { return at(noFlags, imgL4+13, asm.Byte).bits(bit, 1) }

// needs returns the absence bits of all fields used by rules. Only these are dissected.
func needs(rules []Rule) (bits uint32) {
	for _, r := range rules {
		expr.Walk(r.Match.Root, func(n expr.Node) {
			_, present := n.(*expr.Present)
			for _, x := range expr.Operands(n) {
				for _, id := range x.Field.Each() {
					bits |= locations[id].absent
				}
				switch x.Field.ID {
				case expr.SIPMethod:
					bits |= noTCP | noUDP | noPayload
				case expr.DNSName:
					bits |= noUDP | noPayload | noQuestion
					if present {
						bits |= noQType // the name is walked and must be valid
					}
				case expr.DNSType:
					bits |= noUDP | noPayload | noQuestion | noQType
				}
			}
		})
	}
	if bits&(noMSS|noWScale|noSackPerm|noTimestamps|noPorts|noFlags|noUnreadable) != 0 {
		bits |= noTCP
	}
	if bits&noGREKey != 0 {
		bits |= noGRE
	}
	return bits
}

// words returns the image offsets possibly read before a write, in pairs covering slots of 8 bytes (see copy).
func words(need uint32) (offsets []int16) {
	for _, slot := range []struct {
		off  int16
		need uint32
	}{{imgTag0, noTag0 | noTag1}, {imgTag1, noTag1 | anyL4}, {imgL4 + 4, anyL4}, {imgL4 + 12, noTCP | noPayload}, {imgFrag, ^anyLink},
		{imgWScale, noMSS | noWScale}, {imgAt - 4, noPayload}, {imgBody - 4, noPayload}, {imgTS, noTimestamps}, {imgKey, ^uint32(0)}} {
		if need&slot.need != 0 {
			offsets = append(offsets, slot.off, slot.off+4)
		}
	}
	return offsets
}

// ipEnd returns the number of IP header bytes used by rules, of either version.
func ipEnd(rules []Rule) (end int16) {
	for _, r := range rules {
		expr.Walk(r.Match.Root, func(n expr.Node) {
			for _, x := range expr.Operands(n) {
				for _, id := range x.Field.Each() {
					p, size := locations[id], int16(4)
					if expr.Lookup(id).Type == expr.IPv6 {
						size = 16
					}
					if p.absent&(noIP4|noIP6) != 0 && p.off != 0 {
						end = max(end, p.off+size-imgIP)
					}
				}
			}
		})
	}
	return end
}

// usesXor reports whether parities are kept.
func usesXor(rules []Rule) (uses bool) {
	for _, r := range rules {
		expr.Walk(r.Match.Root, func(n expr.Node) {
			if _, ok := n.(*expr.Xor); ok {
				uses = true
			}
		})
	}
	return uses
}

// onlyIPv4 reports whether no rule can match a packet without an IPv4 header: IPv6 needs no dissection. Rates count
// packets even if their rule does not match.
func onlyIPv4(rules []Rule) bool {
	for _, r := range rules {
		if !r.OnlyIPv4() {
			return false
		}
	}
	return true
}

// OnlyIPv4 reports whether the rule can match only packets with an IPv4 header.
func (r Rule) OnlyIPv4() bool { return required(r)&noIP4 != 0 }

// OnlyIPv6 reports whether the rule can match only packets with an IPv6 header.
func (r Rule) OnlyIPv6() bool { return required(r)&noIP6 != 0 }
