// SPDX-License-Identifier: Apache-2.0

// Package expr is the language of weir's filters. It resembles Wireshark's display filters and
// wirefilter.
//
//	e, err := expr.Parse(`udp.dstport == 5060 and not sip.method in {"INVITE" "ACK"}`)
//	match := e.Eval(&expr.Packet{Data: frame, Layer: expr.Link})
//
// Parse returns a typed tree. Its canonical text parses to the same tree. Eval interprets the tree
// over a dissection of the packet. The dissection is written from the RFCs alone and serves as the
// reference for compiled programs (package compile). docs/FILTER-LANGUAGE.md describes the language.
//
// Absent fields have one meaning: a comparison with an absent field is false, except that != is
// true. So x != y and not (x == y) are equivalent. A packet may have several values of a field:
// ip.addr, tcp.port, vlan.id with stacked tags. A comparison is then true if it is true for any of
// them. != is again the negation of ==.
package expr
