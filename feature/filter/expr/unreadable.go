// SPDX-License-Identifier: Apache-2.0

package expr

import "slices"

// Unreadable is a rule's treatment of fields of a present but unreadable transport header.
type Unreadable uint8

// The treatments.
const (
	TreatAbsent  Unreadable = iota // as absent: count rules
	TreatMatch                     // the rule matches if any value could match: drop rules
	TreatNoMatch                   // the rule matches only if every value would match: pass rules
)

// Knowledge is the knowledge of a field of an unreadable transport header.
type Knowledge uint8

// The kinds of knowledge.
const (
	Known    Knowledge = iota // its bytes are readable, or it belongs to another layer or protocol
	Unknown                   // its bytes are unreadable
	UnknownX                  // belongs to an IPv6 extension header: unknown in an IPv6 packet
)

// HaveLink is the readable part of a packet with an IP header after too many VLAN tags.
const HaveLink = -1

// tcpBytes returns the number of TCP header bytes needed for a field.
func tcpBytes(id ID) int {
	switch {
	case id >= TCPSrcPort && id <= TCPSeq:
		return 8
	case id >= TCPAck && id <= TCPWindow:
		return 16
	}
	return 20
}

// known returns the knowledge of a field in a header with have readable bytes: 8, 16 or 20 bytes of
// TCP, or 0 if not even the protocol is known. With 0, IPv6 extension headers are unknown, too.
// have may also be HaveLink.
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

// KnowledgeFrom returns the least knowledge of the node's operands.
func KnowledgeFrom(n Node, have int) (k Knowledge) {
	for _, x := range Operands(n) {
		if o := x.Field.known(have); o == Unknown || o == UnknownX && k == Known {
			k = o
		}
	}
	return k
}

// AnyUnknown reports whether a node or a descendant has an unknown operand.
func AnyUnknown(n Node, have int) (any bool) {
	Walk(n, func(n Node) { any = any || KnowledgeFrom(n, have) != Known })
	return any
}

// rule evaluates the expression of a rule.
func (r *run) rule(u Unreadable) bool {
	if u == TreatAbsent || !r.l.unreadable {
		return r.node(r.e.Root)
	}
	return r.maybe(r.e.Root, u == TreatMatch)
}

// maybe evaluates a node with want as the value of its unknown terms.
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
