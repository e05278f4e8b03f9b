// SPDX-License-Identifier: Apache-2.0

package expr

import "slices"

// Unreadable is how a rule takes fields of a transport header that is there and cannot be read.
type Unreadable uint8

// The ways to take them.
const (
	TreatAbsent  Unreadable = iota // as absent: rules that count
	TreatMatch                     // the rule matches where any value could make it match: rules that drop
	TreatNoMatch                   // the rule matches only where every value would: rules that pass
)

// Knowledge is what is known of a field of an unreadable transport header.
type Knowledge uint8

// The kinds of knowledge.
const (
	Known    Knowledge = iota // its bytes are there, or it is of another layer or protocol
	Unknown                   // its bytes are not there
	UnknownX                  // of an IPv6 extension header: it is unknown in an IPv6 packet
)

// HaveLink is what is there of a packet whose IP header is behind too many VLAN tags.
const HaveLink = -1

// tcpBytes is how many bytes of a TCP header a field needs.
func tcpBytes(id ID) int {
	switch {
	case id >= TCPSrcPort && id <= TCPSeq:
		return 8
	case id >= TCPAck && id <= TCPWindow:
		return 16
	}
	return 20
}

// known says what is known of a field in a header of which have bytes are there: 8, 16 or 20 bytes of TCP, or 0 where nothing
// is known, neither the protocol nor, in IPv6, the extension headers; or HaveLink.
func (f *Field) known(have int) Knowledge {
	switch id := f.ID; {
	case have == HaveLink && !f.Link && id != TransportUnreadable:
		return Unknown
	case id >= IP6HopOpts && id <= IP6FragMore:
		if have == 0 {
			return UnknownX
		}
		return Known
	case id < NetSrcPort || id == TransportUnreadable:
		return Known
	case have == 0:
		return Unknown
	case id >= NetSrcPort && id <= NetPort:
		return Known
	case id == TCPLen || id >= TCPMSS && id <= TCPTSEcr || id == Payload || id == SIPMethod:
		return Unknown
	case id >= TCP && id < TCPMSS && tcpBytes(id) > have:
		return Unknown
	}
	return Known
}

// KnowledgeFrom is the least that is known of the operands of a node.
func KnowledgeFrom(n Node, have int) (k Knowledge) {
	for _, x := range Operands(n) {
		if o := x.Field.known(have); o == Unknown || o == UnknownX && k == Known {
			k = o
		}
	}
	return k
}

// AnyUnknown says whether a node or any below it has an operand that is unknown.
func AnyUnknown(n Node, have int) (any bool) {
	Walk(n, func(n Node) { any = any || KnowledgeFrom(n, have) != Known })
	return any
}

// rule evaluates an expression as that of a rule.
func (r *run) rule(u Unreadable) bool {
	if u == TreatAbsent || !r.l.unreadable {
		return r.node(r.e.Root)
	}
	return r.maybe(r.e.Root, u == TreatMatch)
}

// maybe evaluates a node whose unknown terms are as wanted.
func (r *run) maybe(n Node, want bool) bool {
	switch n := n.(type) {
	case *And:
		return !slices.ContainsFunc(n.X, func(x Node) bool { return !r.maybe(x, want) })
	case *Or:
		return slices.ContainsFunc(n.X, func(x Node) bool { return r.maybe(x, want) })
	case *Not:
		return !r.maybe(n.X, !want)
	case *Xor:
		if AnyUnknown(n, r.l.have) {
			return want
		}
		return r.node(n)
	}
	switch k := KnowledgeFrom(n, r.l.have); {
	case k == Unknown, k == UnknownX && r.l.ip6 != nil:
		return want
	}
	return r.node(n)
}
