// SPDX-License-Identifier: Apache-2.0

package expr

import (
	"bytes"
	"math"
	"regexp/syntax"
	"slices"
)

// Verdict is the result of a match on a truncated packet.
type Verdict uint8

// The verdicts.
const (
	No     Verdict = iota
	Yes            // the packet matches
	Unsure         // depends on bytes missing from the capture
)

func verdict(b bool) Verdict {
	if b {
		return Yes
	}
	return No
}

func (v Verdict) not() Verdict {
	switch v {
	case Yes:
		return No
	case No:
		return Yes
	}
	return Unsure
}

// EvalCut evaluates expressions on a packet cut by a capture. It calls each for an expression that matches, and for one
// left undecided by missing bytes. Captured fields and lengths on the wire count as in the whole packet. A rate counts a
// packet only if everything before it in the expression is decided.
func (v *Env) EvalCut(es []*Expr, p *Packet, unreadable func(i int) Unreadable, each func(i int, v Verdict) (stop bool)) int {
	l := dissect(p)
	for i, e := range es {
		r := &run{v, e, l}
		if got := r.weigh(e.Root, unreadable(i)); got != No && each(i, got) {
			return i
		}
	}
	return len(es)
}

// part is the undissectable part of a truncated packet. It includes all later parts.
type part uint8

const (
	lostNothing   part = iota
	lostPayload        // start or end of the payload
	lostTransport      // the transport header and IPv6 extension headers
	lostNetwork        // the IP header
	lostTags           // VLAN tags, and a truncated Ethernet header
)

// sees reports whether the first n bytes of b are captured. All slices of a truncated packet share
// one array: their capacity determines their offset.
func (l *layers) sees(b []byte, n int) bool { return !l.cut || n == 0 || l.size-cap(b)+n <= l.captured }

// seen returns the captured part of b.
func (l *layers) seen(b []byte) []byte {
	if l.cut {
		return b[:max(0, min(len(b), l.captured-(l.size-cap(b))))]
	}
	return b
}

// Transport protocols (IANA).
const (
	protoICMP  = 1
	protoTCP   = 6
	protoUDP   = 17
	protoGRE   = 47
	protoICMP6 = 58
)

// begun is the minimum captured length for a transport header to be present, as in Wireshark:
// ports, or type, code and checksum.
const begun = 4

// wholeHeader returns the minimum length of a transport header.
func wholeHeader(proto byte) int {
	switch proto {
	case protoTCP:
		return 20
	case protoGRE:
		return 4
	case protoUDP, protoICMP, protoICMP6:
		return 8
	}
	return math.MaxInt // not dissected
}

// ends has the end offset of each field in its header.
var ends = [lastField]int{IP4: 1, IP4Version: 1, IP4HdrLen: 1, IP4DSCP: 2, IP4ECN: 2, IP4Len: 4, IP4ID: 6, IP4DF: 7, IP4MF: 7, IP4FragOffset: 8, IP4TTL: 9, IP4Proto: 10, IP4Checksum: 12, IP4Src: 16, IP4Dst: 20,
	IP6: 1, IP6DSCP: 2, IP6ECN: 2, IP6Flow: 4, IP6Plen: 6, IP6Next: 7, IP6Hlim: 8, IP6Src: 24, IP6Dst: 40, IP6Frag: 8, IP6FragOffset: 8, IP6FragMore: 8,
	TCP: begun, TCPSrcPort: 2, TCPDstPort: 4, TCPSeq: 8, TCPAck: 12, TCPHdrLen: 13, TCPFlags: 14, TCPFin: 14, TCPSyn: 14, TCPReset: 14, TCPPush: 14, TCPAckFlag: 14, TCPUrg: 14, TCPEce: 14, TCPCwr: 14,
	TCPWindow: 16, TCPChecksum: 18, TCPUrgent: 20,
	UDP: begun, UDPSrcPort: 2, UDPDstPort: 4, UDPLength: 6, UDPChecksum: 8,
	ICMP: begun, ICMPType: 1, ICMPCode: 2, ICMPChecksum: 4, ICMPIdent: 6, ICMPSeq: 8, ICMP6: begun, ICMP6Type: 1, ICMP6Code: 2, ICMP6Checksum: 4,
	GRE: begun, GREFlags: 2, GREProto: 4}

// header returns the header of a field, or nil if the packet has none.
func (l *layers) header(id ID) []byte {
	switch {
	case id >= IP4 && id <= IP4Addr:
		return l.ip4
	case id >= IP6Frag && id <= IP6FragMore:
		return l.frag
	case id >= IP6 && id <= IP6Addr:
		return l.ip6
	case id == TCP:
		return l.tcp
	case id > TCP && id <= TCPUrgent:
		return l.tcpHead
	case id >= UDP && id <= UDPChecksum:
		return l.udp
	case id >= ICMP && id <= ICMPSeq:
		return l.icmp
	case id >= ICMP6 && id <= ICMP6Checksum:
		return l.icmp6
	case id >= GRE && id <= GREProto:
		return l.gre
	}
	return nil
}

// hidden reports whether the field's header is present but the field's bytes are not captured.
func (l *layers) hidden(id ID) bool {
	if !l.cut {
		return false
	}
	if (id == IP6FragOffset || id == IP6FragMore) && l.lost == lostTransport && l.proto < 0 {
		return l.frag != nil // the last of several fragment headers counts
	}
	h := l.header(id)
	return len(h) >= ends[id] && !l.sees(h, ends[id])
}

// misses reports whether the packet may have the field in its missing bytes.
func (l *layers) misses(id ID) bool {
	switch {
	case !l.cut:
		return false
	case l.hidden(id):
		return true
	case id >= Vlan && id <= VlanEtype1:
		return l.lost >= lostTags
	case id < IP4:
		return l.lost >= lostTags && l.eth == nil
	case id < IP6:
		return l.lost >= lostTags || l.lost == lostNetwork && l.etherType != etherIPv6
	case id < NetSrc:
		v6 := l.etherType != etherIPv4
		return l.lost >= lostTags || l.lost == lostNetwork && v6 || l.lost == lostTransport && l.ip6 != nil && l.proto < 0 && id >= IP6HopOpts
	case id == TransportUnreadable:
		return l.lost != lostNothing && !l.unreadable
	case l.lost >= lostTransport:
		return l.lost > lostTransport || l.proto < 0 || slices.Contains(fieldProtocols(id), l.proto)
	case id >= TCPMSS && id <= TCPTSEcr:
		return l.lost == lostPayload && l.tcp != nil || len(l.tcp) > 20 && !l.sees(l.tcp, len(l.tcp))
	case id == TCPLen:
		return l.lost == lostPayload && l.tcp != nil
	case id == GREKey:
		return l.gre != nil && !l.seesKey()
	case id == Payload:
		return l.lost == lostPayload
	case id == SIPMethod:
		return l.missesMethod()
	case id == DNSName || id == DNSType:
		return l.missesQuestion(id)
	}
	return false
}

// fieldProtocols returns the protocols with a transport field.
func fieldProtocols(id ID) []int {
	switch {
	case id >= TCP && id <= TCPTSEcr:
		return []int{protoTCP}
	case id >= UDP && id <= UDPChecksum, id == DNSName, id == DNSType:
		return []int{protoUDP}
	case id >= ICMP && id <= ICMPSeq:
		return []int{protoICMP}
	case id >= ICMP6 && id <= ICMP6Checksum:
		return []int{protoICMP6}
	case id >= GRE && id <= GREKey:
		return []int{protoGRE}
	case id == SIPMethod:
		return []int{protoTCP, protoUDP}
	}
	return []int{protoTCP, protoUDP, protoICMP, protoICMP6}
}

// seesKey reports whether a GRE key is decided by captured bytes: the flags and, if they announce a
// key, the key.
func (l *layers) seesKey() bool {
	if !l.sees(l.gre, 2) || l.gre[0]&0x20 == 0 {
		return l.sees(l.gre, 2)
	}
	end := 8
	if l.gre[0]&0x80 != 0 {
		end = 12
	}
	return len(l.gre) < end || l.sees(l.gre, end)
}

func (l *layers) missesMethod() bool {
	if l.noPayload || l.udp == nil && l.tcp == nil {
		return l.lost == lostPayload
	}
	s := l.seen(l.payload)
	if len(s) == len(l.payload) || len(s) > MaxMethod {
		return false
	}
	return !bytes.ContainsFunc(s, func(r rune) bool { return r < 'A' || r > 'Z' })
}

func (l *layers) missesQuestion(id ID) bool {
	if l.noPayload || l.udp == nil {
		return l.lost == lostPayload && l.udp != nil
	}
	s := l.seen(l.payload)
	if len(s) == len(l.payload) || len(l.payload) < 12 || len(s) >= 6 && be.Uint16(s[4:]) == 0 {
		return false
	}
	_, rest, ok := l.question()
	return !ok || id == DNSType && len(rest) < 2
}

// missing reports whether a term depends on missing bytes. It applies to terms evaluated as false
// without them.
func (r *run) missing(n Node) bool {
	return slices.ContainsFunc(Operands(n), func(x Operand) bool {
		if x.Field.ID != Payload {
			return slices.ContainsFunc(x.Field.Each(), r.l.misses)
		}
		if r.l.misses(Payload) || r.l.noPayload || x.Part == Length {
			return r.l.misses(Payload)
		}
		if x.Part == Byte {
			i := offsetIn(len(r.l.payload), x.From)
			return i >= 0 && i < len(r.l.payload) && !r.l.sees(r.l.payload, i+1)
		}
		b, ok := r.slice(x)
		switch n.(type) {
		case *Contains, *Matches:
			b = window(b)
		case *Present:
			return false
		}
		return ok && !r.l.sees(b, len(b))
	})
}

// atEnd reports whether a pattern is anchored to the end of the text.
func (p *Pattern) atEnd() bool {
	return slices.ContainsFunc(p.Prog.Inst, func(i syntax.Inst) bool {
		return i.Op == syntax.InstEmptyWidth && syntax.EmptyOp(i.Arg)&syntax.EmptyEndText != 0
	})
}

// weigh evaluates a node for a truncated packet. A term true by the captured bytes is true: missing
// bytes can add values but not remove any.
func (r *run) weigh(n Node, u Unreadable) Verdict {
	switch n := n.(type) {
	case *And:
		return r.weighAll(n.X, u, No)
	case *Or:
		return r.weighAll(n.X, u, Yes)
	case *Not:
		return r.weigh(n.X, opposite(u)).not()
	case *Xor:
		have, is, may := r.l.mayBeUnreadable(u)
		if may && AnyUnknown(n, have) {
			return agree(is, verdict(u == TreatMatch), func() Verdict { return r.odd(n.X) })
		}
		return r.odd(n.X)
	}
	have, is, may := r.l.mayBeUnreadable(u)
	if k := KnowledgeFrom(n, have); may && (k == Unknown || k == UnknownX && (r.l.ip6 != nil || r.l.lost >= lostNetwork)) {
		return agree(is, verdict(u == TreatMatch), func() Verdict { return r.leaf(n) })
	}
	return r.leaf(n)
}

// agree returns v for an unreadable header. For a possibly unreadable one, it returns the verdict
// common to both cases, or Unsure.
func agree(unreadable bool, v Verdict, readable func() Verdict) Verdict {
	if unreadable || readable() == v {
		return v
	}
	return Unsure
}

// mayBeUnreadable reports whether the transport header is unreadable, or may be, for rules with
// treatment u. have is the number of its readable bytes in this case.
func (l *layers) mayBeUnreadable(u Unreadable) (have int, is, may bool) {
	switch {
	case u == TreatAbsent:
	case l.unreadable:
		return l.have, true, true
	case l.lost == lostTags:
		return HaveLink, false, true
	case l.lost >= lostTransport && l.proto <= 0:
		return 0, false, true
	case l.lost != lostNothing && l.proto == protoTCP:
		return 20, false, true
	}
	return 0, false, false
}

// odd evaluates the terms of an xor.
func (r *run) odd(nodes []Node) Verdict {
	odd := No
	for _, x := range nodes {
		v := r.weigh(x, TreatAbsent)
		if v == Unsure {
			return Unsure
		}
		odd = verdict(v != odd)
	}
	return odd
}

// leaf evaluates a term.
func (r *run) leaf(n Node) Verdict {
	if c, ok := n.(*Compare); ok && c.Op == Ne {
		return r.leaf(&Compare{at: c.at, X: c.X, Op: Eq, V: c.V}).not()
	}
	if rate, ok := n.(*Rate); ok {
		if r.missing(n) {
			return Unsure
		}
		return verdict(r.rate(rate))
	}
	if r.term(n) {
		return Yes
	} else if r.missing(n) {
		return Unsure
	}
	return No
}

// weighAll evaluates nodes in turn until one has the verdict decides.
func (r *run) weighAll(nodes []Node, u Unreadable, decides Verdict) Verdict {
	out := decides.not()
	for _, x := range nodes {
		if out == Unsure && counts(x) {
			continue // the packet may not reach this rate
		}
		switch v := r.weigh(x, u); v {
		case decides:
			return v
		case Unsure:
			out = Unsure
		}
	}
	return out
}

func opposite(u Unreadable) Unreadable {
	switch u {
	case TreatMatch:
		return TreatNoMatch
	case TreatNoMatch:
		return TreatMatch
	}
	return u
}

// counts reports whether a tree has a rate.
func counts(n Node) (any bool) {
	Walk(n, func(n Node) {
		_, ok := n.(*Rate)
		any = any || ok
	})
	return any
}
