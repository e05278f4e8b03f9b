// SPDX-License-Identifier: Apache-2.0

package expr

import (
	"bytes"
	"math"
	"regexp/syntax"
	"slices"
)

// Verdict is what is known of a packet's match.
type Verdict uint8

// The verdicts.
const (
	No     Verdict = iota
	Yes            // the packet matches
	Unsure         // bytes decide that the capture has cut off
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

// part is what of a cut packet cannot be taken apart, and all that lies behind it.
type part uint8

const (
	lostNothing   part = iota
	lostPayload        // where the payload begins or ends
	lostTransport      // the transport header, and IPv6 extension headers
	lostNetwork        // the IP header
	lostTags           // VLAN tags, and the Ethernet header if any of that is cut off
)

// sees says whether the first n bytes of b are captured. All slices of a cut packet share one array: their capacity tells where
// they begin.
func (l *layers) sees(b []byte, n int) bool { return !l.cut || n == 0 || l.size-cap(b)+n <= l.captured }

// seen is as much of b as is captured.
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

// begun is how many bytes of a transport header tell Wireshark that it is there: ports, or type, code and checksum.
const begun = 4

// wholeHeader is how many bytes a transport header has at least.
func wholeHeader(proto byte) int {
	switch proto {
	case protoTCP:
		return 20
	case protoGRE:
		return 4
	case protoUDP, protoICMP, protoICMP6:
		return 8
	}
	return math.MaxInt // not looked at
}

// ends is where a field's bytes end in its header.
var ends = [lastField]int{IP4: 1, IP4Version: 1, IP4HdrLen: 1, IP4DSCP: 2, IP4ECN: 2, IP4Len: 4, IP4ID: 6, IP4DF: 7, IP4MF: 7, IP4FragOffset: 8, IP4TTL: 9, IP4Proto: 10, IP4Checksum: 12, IP4Src: 16, IP4Dst: 20,
	IP6: 1, IP6DSCP: 2, IP6ECN: 2, IP6Flow: 4, IP6Plen: 6, IP6Next: 7, IP6Hlim: 8, IP6Src: 24, IP6Dst: 40, IP6Frag: 8, IP6FragOffset: 8, IP6FragMore: 8,
	TCP: begun, TCPSrcPort: 2, TCPDstPort: 4, TCPSeq: 8, TCPAck: 12, TCPHdrLen: 13, TCPFlags: 14, TCPFin: 14, TCPSyn: 14, TCPReset: 14, TCPPush: 14, TCPAckFlag: 14, TCPUrg: 14, TCPEce: 14, TCPCwr: 14,
	TCPWindow: 16, TCPChecksum: 18, TCPUrgent: 20,
	UDP: begun, UDPSrcPort: 2, UDPDstPort: 4, UDPLength: 6, UDPChecksum: 8,
	ICMP: begun, ICMPType: 1, ICMPCode: 2, ICMPChecksum: 4, ICMPIdent: 6, ICMPSeq: 8, ICMP6: begun, ICMP6Type: 1, ICMP6Code: 2, ICMP6Checksum: 4,
	GRE: begun, GREFlags: 2, GREProto: 4}

// header is the header that a field is of, nil where the packet has none.
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

// hidden says whether the header of a field is there, and the capture has cut the field's bytes off.
func (l *layers) hidden(id ID) bool {
	if !l.cut {
		return false
	}
	if (id == IP6FragOffset || id == IP6FragMore) && l.lost == lostTransport && l.proto < 0 {
		return l.frag != nil // of several fragment headers the last one counts
	}
	h := l.header(id)
	return len(h) >= ends[id] && !l.sees(h, ends[id])
}

// misses says whether a packet may have a field whose bytes the capture has cut off.
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

// fieldProtocols is which protocols have a transport field.
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

// seesKey says whether the bytes are captured that tell a GRE key: the flags, and the key if they say that there is one.
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

// missing says whether a term depends on bytes that the capture has cut off. It is asked of terms that are false without them.
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

// weigh evaluates a node of a cut packet. A term that is true by the bytes that are there is true: missing bytes add values and
// take none away.
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

// agree is the verdict of an unreadable header, if it is one, and else what both verdicts agree on.
func agree(unreadable bool, v Verdict, readable func() Verdict) Verdict {
	if unreadable || readable() == v {
		return v
	}
	return Unsure
}

// mayBeUnreadable says whether the transport header is unreadable, or may be for all that is captured of it, to rules that ask; and
// how much of it has bytes then.
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

// odd is xor.
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

// weighAll evaluates nodes in turn until one is as decides says.
func (r *run) weighAll(nodes []Node, u Unreadable, decides Verdict) Verdict {
	out := decides.not()
	for _, x := range nodes {
		if out == Unsure && counts(x) {
			continue // the packet may not come here
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

// counts says whether a rate is in a tree.
func counts(n Node) (any bool) {
	Walk(n, func(n Node) {
		_, ok := n.(*Rate)
		any = any || ok
	})
	return any
}
