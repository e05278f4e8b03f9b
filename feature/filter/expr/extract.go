// SPDX-License-Identifier: Apache-2.0

package expr

import (
	"bytes"
	"net/netip"
)

// number returns the value of a single-valued numeric or link-layer address field, and whether it
// is present.
func (l *layers) number(id ID) (v uint64, ok bool) {
	switch {
	case l.hidden(id):
		return 0, false
	case id <= VlanEtype1:
		return l.linkNumber(id)
	case id <= IP4Addr:
		return ip4Number(l.ip4, id)
	case id <= IP6FragMore:
		return l.ip6Number(id)
	case id <= TCPTSEcr:
		return l.tcpNumber(id)
	}
	return l.otherNumber(id)
}

func mac48(b []byte) uint64 { return uint64(be.Uint16(b))<<32 | uint64(be.Uint32(b[2:])) }

func (l *layers) linkNumber(id ID) (v uint64, ok bool) {
	if l.eth == nil {
		return 0, false
	}
	tag := func(i int, f func(tci uint16) uint16) (uint64, bool) {
		if i >= len(l.tags) {
			return 0, false
		}
		return uint64(f(l.tags[i])), true
	}
	number := func(tci uint16) uint16 { return tci & 0xfff }
	priority := func(tci uint16) uint16 { return tci >> 13 }
	dei := func(tci uint16) uint16 { return tci >> 12 & 1 }
	switch id {
	case EthDst:
		return mac48(l.eth), true
	case EthSrc:
		return mac48(l.eth[6:]), true
	case EthType:
		return uint64(l.ethType), true
	case VlanID0:
		return tag(0, number)
	case VlanID1:
		return tag(1, number)
	case VlanPriority0:
		return tag(0, priority)
	case VlanPriority1:
		return tag(1, priority)
	case VlanDEI0:
		return tag(0, dei)
	case VlanDEI1:
		return tag(1, dei)
	case VlanEtype0, VlanEtype1:
		i := int(id - VlanEtype0)
		if i >= len(l.tags) {
			return 0, false
		}
		return uint64(l.etypes[i]), true
	}
	return 0, false
}

func ip4Number(b []byte, id ID) (v uint64, ok bool) {
	if b == nil {
		return 0, false
	}
	switch id {
	case IP4Version:
		v = uint64(b[0] >> 4)
	case IP4HdrLen:
		v = uint64(b[0]&15) * 4
	case IP4DSCP:
		v = uint64(b[1] >> 2)
	case IP4ECN:
		v = uint64(b[1] & 3)
	case IP4Len:
		v = uint64(be.Uint16(b[2:]))
	case IP4ID:
		v = uint64(be.Uint16(b[4:]))
	case IP4DF:
		v = uint64(b[6] >> 6 & 1)
	case IP4MF:
		v = uint64(b[6] >> 5 & 1)
	case IP4FragOffset:
		v = uint64(be.Uint16(b[6:])&0x1fff) * 8
	case IP4TTL:
		v = uint64(b[8])
	case IP4Proto:
		v = uint64(b[9])
	case IP4Checksum:
		v = uint64(be.Uint16(b[10:]))
	default:
		return 0, false
	}
	return v, true
}

func (l *layers) ip6Number(id ID) (v uint64, ok bool) {
	if id == IP6FragOffset || id == IP6FragMore {
		if l.frag == nil {
			return 0, false
		}
		w := uint64(be.Uint16(l.frag[2:]))
		if id == IP6FragOffset {
			return w >> 3, true
		}
		return w & 1, true
	}
	b := l.ip6
	if b == nil {
		return 0, false
	}
	class := uint64(be.Uint16(b)) >> 4 & 255
	switch id {
	case IP6DSCP:
		v = class >> 2
	case IP6ECN:
		v = class & 3
	case IP6Flow:
		v = uint64(be.Uint32(b)) & 0xfffff
	case IP6Plen:
		v = uint64(be.Uint16(b[4:]))
	case IP6Next:
		v = uint64(b[6])
	case IP6Hlim:
		v = uint64(b[7])
	default:
		return 0, false
	}
	return v, true
}

func (l *layers) tcpNumber(id ID) (v uint64, ok bool) {
	b := l.tcpHead
	if len(b) < tcpBytes(id) {
		return 0, false
	}
	half := func(i int) (uint64, bool) { return uint64(be.Uint16(b[i:])), true }
	if id >= TCPFin && id <= TCPCwr {
		bit := map[ID]int{TCPFin: 0, TCPSyn: 1, TCPReset: 2, TCPPush: 3, TCPAckFlag: 4, TCPUrg: 5, TCPEce: 6, TCPCwr: 7}[id]
		return uint64(b[13] >> bit & 1), true
	}
	switch id {
	case TCPSrcPort:
		return half(0)
	case TCPDstPort:
		return half(2)
	case TCPSeq:
		return uint64(be.Uint32(b[4:])), true
	case TCPAck:
		return uint64(be.Uint32(b[8:])), true
	case TCPHdrLen:
		return uint64(b[12]>>4) * 4, true
	case TCPFlags:
		return uint64(be.Uint16(b[12:]) & 0xfff), true
	case TCPWindow:
		return half(14)
	case TCPChecksum:
		return half(16)
	case TCPUrgent:
		return half(18)
	case TCPLen:
		return uint64(len(l.payload)), !l.noPayload
	}
	return l.tcpOption(id)
}

func (l *layers) tcpOption(id ID) (v uint64, ok bool) {
	switch id {
	case TCPMSS:
		if o := l.option(2, 4); o != nil {
			return uint64(be.Uint16(o[2:])), true
		}
	case TCPWScale:
		if o := l.option(3, 3); o != nil {
			return uint64(o[2]), true
		}
	case TCPTSVal, TCPTSEcr:
		if o := l.option(8, 10); o != nil {
			return uint64(be.Uint32(o[2+4*int(id-TCPTSVal):])), true
		}
	}
	return 0, false
}

func (l *layers) otherNumber(id ID) (v uint64, ok bool) {
	header, i, size := l.udp, 0, 2
	switch id {
	case UDPSrcPort:
	case UDPDstPort:
		i = 2
	case UDPLength:
		i = 4
	case UDPChecksum:
		i = 6
	case ICMPType, ICMPCode:
		header, i, size = l.icmp, int(id-ICMPType), 1
	case ICMPChecksum, ICMPIdent, ICMPSeq:
		header, i = l.icmp, 2+2*int(id-ICMPChecksum)
	case ICMP6Type, ICMP6Code:
		header, i, size = l.icmp6, int(id-ICMP6Type), 1
	case ICMP6Checksum:
		header, i = l.icmp6, 2
	case GREFlags, GREProto:
		header, i = l.gre, 2*int(id-GREFlags)
	case GREKey:
		return l.greKey()
	case DNSType:
		if _, rest, ok := l.question(); ok && len(rest) >= 2 {
			return uint64(be.Uint16(rest)), true
		}
		return 0, false
	default:
		return 0, false
	}
	if header == nil {
		return 0, false
	}
	if size == 1 {
		return uint64(header[i]), true
	}
	return uint64(be.Uint16(header[i:])), true
}

// greKey returns the key if the K bit is set. The key follows a checksum if the C bit is set (RFC
// 2890).
func (l *layers) greKey() (uint64, bool) {
	if l.gre == nil || !l.seesKey() || l.gre[0]&0x20 == 0 {
		return 0, false
	}
	i := 4
	if l.gre[0]&0x80 != 0 {
		i = 8
	}
	if len(l.gre) < i+4 {
		return 0, false
	}
	return uint64(be.Uint32(l.gre[i:])), true
}

// address returns the value of a single-valued address field.
func (l *layers) address(id ID) (netip.Addr, bool) {
	switch {
	case l.hidden(id):
		return netip.Addr{}, false
	case id == IP4Src && l.ip4 != nil:
		return netip.AddrFrom4([4]byte(l.ip4[12:16])), true
	case id == IP4Dst && l.ip4 != nil:
		return netip.AddrFrom4([4]byte(l.ip4[16:20])), true
	case id == IP6Src && l.ip6 != nil:
		return netip.AddrFrom16([16]byte(l.ip6[8:24])), true
	case id == IP6Dst && l.ip6 != nil:
		return netip.AddrFrom16([16]byte(l.ip6[24:40])), true
	}
	return netip.Addr{}, false
}

// there reports whether the packet has a field.
func (l *layers) there(id ID) bool {
	if l.hidden(id) {
		return false
	}
	switch id {
	case Eth:
		return l.eth != nil
	case Vlan:
		return len(l.tags) > 0
	case IP4:
		return l.ip4 != nil
	case IP6:
		return l.ip6 != nil
	case IP6HopOpts:
		return l.hopOpts
	case IP6DstOpts:
		return l.dstOpts
	case IP6Routing:
		return l.routing
	case IP6Frag:
		return l.frag != nil
	case TCP:
		return l.tcp != nil
	case TCPSackPerm:
		return l.option(4, 2) != nil
	case UDP:
		return l.udp != nil
	case ICMP:
		return l.icmp != nil
	case ICMP6:
		return l.icmp6 != nil
	case GRE:
		return l.gre != nil
	case Payload:
		return !l.noPayload
	case TransportUnreadable:
		return l.unreadable
	case SIPMethod:
		_, ok := l.method()
		return ok
	case DNSName:
		_, _, ok := l.question()
		return ok
	}
	if _, ok := l.address(id); ok {
		return true
	}
	_, ok := l.number(id)
	return ok
}

// method returns the method of a SIP request (RFC 3261, 7.1): capital letters followed by a space.
func (l *layers) method() ([]byte, bool) {
	if l.noPayload || l.udp == nil && l.tcp == nil {
		return nil, false
	}
	m, _, found := bytes.Cut(l.seen(l.payload), []byte(" "))
	if !found || len(m) < 1 || len(m) > MaxMethod {
		return nil, false
	}
	for _, c := range m {
		if c < 'A' || c > 'Z' {
			return nil, false
		}
	}
	return m, true
}

// question returns the encoded name of a DNS message's first question (RFC 1035, 4.1.2), and the
// bytes after it.
func (l *layers) question() (name, rest []byte, ok bool) {
	b := l.seen(l.payload)
	if l.udp == nil || len(b) < 12 || be.Uint16(b[4:]) == 0 {
		return nil, nil, false
	}
	b = b[12:]
	for i, labels := 0, 0; i < len(b) && i < MaxName; labels++ {
		n := int(b[i])
		if n == 0 {
			return b[:i+1], b[i+1:], true
		}
		if n > 63 || labels == MaxLabels {
			return nil, nil, false // a compression pointer, not allowed in the first question
		}
		i += 1 + n
	}
	return nil, nil, false
}
