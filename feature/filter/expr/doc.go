// SPDX-License-Identifier: Apache-2.0

// Package expr is the language of weir's filters: what Wireshark's display filters and wirefilter have made known.
//
//	e, err := expr.Parse(`udp.dstport == 5060 and not sip.method in {"INVITE" "ACK"}`)
//	match := e.Eval(&expr.Packet{Data: frame, Layer: expr.Link})
//
// An expression is parsed to a typed tree, which prints in one canonical way and parses again to itself. Eval interprets the
// tree over a dissection of the packet that is written from the RFCs alone: it is the reference that compiled programs
// (package compile) are held to. docs/FILTER.md is the language's page.
//
// Absent fields have one meaning: a comparison with a field that the packet does not have is false, but that != is true.
// So x != y and not (x == y) are the same. Of a field that a packet has several times (ip.addr, tcp.port, vlan.id with
// stacked tags) a comparison is true if it is for any of them, and != again is what == is not.
package expr
