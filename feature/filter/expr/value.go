// SPDX-License-Identifier: Apache-2.0

package expr

import (
	"cmp"
	"encoding/hex"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// Limits of the bytes read by a program.
const (
	Window     = 256  // bytes searched by contains and matches, from the start of the operand
	maxLiteral = 128  // bytes of a text in a comparison
	maxOffset  = 9000 // bytes of a slice's offset, from either end of the payload
	MaxMethod  = 16   // letters of a SIP method
)

// compare parses the value of a comparison.
func (p *parser) compare(here at, x Operand, op Op) (Node, *Error) {
	t := p.peek()
	v, err := p.value(x)
	if err != nil {
		return nil, err
	}
	ordered := op != Eq && op != Ne
	switch x.Type() {
	case Bytes, Name:
		if ordered {
			return nil, p.fail(t.pos, "%s compares with a text by == and != only, not by %s", x, op)
		}
		if err := p.fits(x, v, t); err != nil {
			return nil, err
		}
	case IPv4, IPv6, IP:
		if ordered && v.isRange() {
			return nil, p.fail(t.pos, "%s compares with one address: use in {…} for a prefix or a range", op)
		}
		if ordered && x.Type() == IP {
			return nil, p.fail(t.pos, "%s may be IPv4 or IPv6, without a common order: use ip.… or ipv6.…", x)
		}
	case MAC:
		if ordered {
			return nil, p.fail(t.pos, "link-layer addresses have no order: %s is not supported", op)
		}
	}
	if ordered && v.isRange() {
		return nil, p.fail(t.pos, "%s compares with one number", op)
	}
	return &Compare{here, x, op, v}, nil
}

// fits rejects a text of another length than the slice.
func (p *parser) fits(x Operand, v Value, t token) *Error {
	if x.Part != Slice {
		return nil
	}
	if n, fixed := x.Size(); fixed && n != len(v.Bytes) {
		return p.fail(t.pos, "%s has %d bytes and this text %d, so they are never equal: slices are [from:to], not [from:length]", x, n, len(v.Bytes))
	}
	return nil
}

// Size returns the length of a slice, if it does not depend on the packet.
func (o Operand) Size() (n int, fixed bool) {
	switch {
	case o.Open && o.From < 0:
		return -o.From, true
	case !o.Open && (o.From < 0) == (o.To < 0):
		return o.To - o.From, true
	}
	return 0, false
}

// value parses a value for the operand.
func (p *parser) value(x Operand) (Value, *Error) {
	t := p.next()
	if t.kind == end {
		return Value{}, p.fail(t.pos, "the expression ends here: want a value for %s", x)
	}
	switch x.Type() {
	case Bool, Uint:
		return p.numbers(t, x)
	case MAC:
		m, ok := parseMAC(t)
		if !ok {
			return Value{}, p.fail(t.pos, "got %s, want a link-layer address like 02:00:00:00:00:01", t)
		}
		return Value{Lo: m, Hi: m}, nil
	case IPv4, IPv6, IP:
		return p.addresses(t, x)
	case Bytes:
		return p.literal(t)
	case Name:
		if t.kind != text {
			return Value{}, p.fail(t.pos, "got %s, want a text in quotes", t)
		}
		return p.name(t, x)
	}
	return Value{}, p.fail(t.pos, "%s is a protocol without a value%s", x, suggestFields(x.Field))
}

// numbers parses a number or a range of numbers.
func (p *parser) numbers(t token, x Operand) (Value, *Error) {
	lo, err := p.number(t, x.Bits(), x)
	if err != nil {
		return Value{}, err
	}
	v := Value{Lo: lo, Hi: lo}
	if !p.accept("..") {
		return v, nil
	}
	u := p.next()
	if v.Hi, err = p.number(u, x.Bits(), x); err != nil {
		return Value{}, err
	}
	if v.Hi < v.Lo {
		return Value{}, p.fail(t.pos, "a range from %d down to %d: write %d..%d", v.Lo, v.Hi, v.Hi, v.Lo)
	}
	return v, nil
}

func (p *parser) number(t token, bits int, x Operand) (uint64, *Error) {
	if x.Type() == Bool && t.kind == word {
		switch strings.ToLower(t.s) { // Wireshark writes True
		case "true":
			return 1, nil
		case "false":
			return 0, nil
		}
	}
	s, base := t.s, 10
	if h, ok := strings.CutPrefix(s, "0x"); ok {
		s, base = h, 16
	}
	v, err := strconv.ParseUint(s, base, 64)
	if t.kind != word || err != nil && (v == 0 || s == "") {
		n, hint := fieldNumber(t.s, x)
		e := p.fail(t.pos, "got %s, want a number for %s%s", t, x, hint)
		e.Suggestion = cmp.Or(n, dotted(t))
		return 0, e
	}
	if base == 10 && len(s) > 1 && s[0] == '0' {
		return 0, p.fail(t.pos, "%s begins with 0 and may be read as octal: omit the 0, or write 0x", t)
	}
	if most := uint64(1)<<bits - 1; v > most || err != nil {
		if bits == 1 {
			return 0, p.fail(t.pos, "%s has one bit: want 0 or 1", x)
		}
		return 0, p.fail(t.pos, "%s has %d bits: %s exceeds %d", x, bits, t, most)
	}
	return v, nil
}

// dotted rewrites a range with - to the notation with two dots, or returns "" for other tokens.
func dotted(t token) string {
	from, to, ok := strings.Cut(t.s, "-")
	if t.kind != word || !ok || from == "" || to == "" || from[0] > '9' && !strings.Contains(from, ":") {
		return ""
	}
	return from + ".." + to
}

func parseMAC(t token) (uint64, bool) {
	part := strings.FieldsFunc(t.s, func(r rune) bool { return r == ':' || r == '-' })
	if t.kind != word || len(part) != 6 || len(t.s) != 17 {
		return 0, false
	}
	v, err := strconv.ParseUint(strings.Join(part, ""), 16, 48)
	return v, err == nil
}

// addresses parses an address, a prefix or a range.
func (p *parser) addresses(t token, x Operand) (Value, *Error) {
	if t.kind != word {
		return Value{}, p.fail(t.pos, "got %s, want an address, a prefix or a range of addresses", t)
	}
	if strings.HasPrefix(t.s, "$") {
		return Value{}, p.fail(t.pos, "match lists by in: %s in %s", x, t.s)
	}
	if strings.Contains(t.s, "/") {
		n, err := netip.ParsePrefix(t.s)
		if err != nil {
			return Value{}, p.fail(t.pos, "got %s, want a prefix like 192.0.2.0/24 or 2001:db8::/32", t.s)
		}
		if m := n.Masked(); m != n {
			e := p.fail(t.pos, "%s has bits set beyond its length", t.s)
			e.Suggestion = m.String()
			return Value{}, e
		}
		return Value{Prefix: n}, p.family(t, n.Addr(), x)
	}
	from, err := p.address(t, x)
	if err != nil || !p.accept("..") {
		return Value{Prefix: netip.PrefixFrom(from, from.BitLen())}, err
	}
	u := p.next()
	to, err := p.address(u, x)
	switch {
	case err != nil:
		return Value{}, err
	case from.Is4() != to.Is4():
		return Value{}, p.fail(u.pos, "a range from IPv4 to IPv6")
	case to.Less(from):
		return Value{}, p.fail(t.pos, "a range from %s down to %s: write %s..%s", from, to, to, from)
	case from == to:
		return Value{Prefix: netip.PrefixFrom(from, from.BitLen())}, nil
	}
	return Value{From: from, To: to}, nil
}

func (p *parser) address(t token, x Operand) (netip.Addr, *Error) {
	a, err := netip.ParseAddr(t.s)
	if t.kind != word || err != nil || a.Zone() != "" {
		e := p.fail(t.pos, "got %s, want an address like %s", t, map[bool]string{true: "2001:db8::1", false: "192.0.2.1"}[x.Type() == IPv6])
		e.Suggestion = dotted(t)
		return a, e
	}
	return a, p.family(t, a, x)
}

func (p *parser) family(t token, a netip.Addr, x Operand) *Error {
	other := ""
	switch {
	case x.Type() == IPv4 && !a.Is4():
		other = "ipv6." + strings.TrimPrefix(x.Field.Name, "ip.")
	case x.Type() == IPv6 && a.Is4():
		other = "ip." + strings.TrimPrefix(x.Field.Name, "ipv6.")
	default:
		return nil
	}
	e := p.fail(t.pos, "%s has another address family than %s", t.s, x)
	e.Suggestion = other
	return e
}

// literal parses "…", or bytes as in 16:03:01.
func (p *parser) literal(t token) (Value, *Error) {
	b := []byte(t.s)
	if t.kind == word {
		h, err := hex.DecodeString(strings.ReplaceAll(t.s, ":", ""))
		if err != nil || len(t.s) != 3*len(h)-1 {
			return Value{}, p.fail(t.pos, "got %s, want a text in quotes, or bytes like 16:03:01", t)
		}
		b = h
	} else if t.kind != text {
		return Value{}, p.fail(t.pos, "got %s, want a text in quotes", t)
	}
	if len(b) < 1 || len(b) > maxLiteral {
		return Value{}, p.fail(t.pos, "text has %d bytes: want 1 to %d", len(b), maxLiteral)
	}
	return Value{Bytes: b}, nil
}

// name parses a SIP method or a domain name. It stores a domain name in lower case without a final
// dot.
func (p *parser) name(t token, x Operand) (Value, *Error) {
	if x.Field.ID == SIPMethod {
		for i := range len(t.s) {
			if t.s[i] < 'A' || t.s[i] > 'Z' {
				e := p.fail(t.pos, "a SIP method has capital letters only")
				e.Suggestion = strings.ToUpper(t.s)
				return Value{}, e
			}
		}
		if len(t.s) < 1 || len(t.s) > MaxMethod {
			return Value{}, p.fail(t.pos, "a SIP method has 1 to %d letters", MaxMethod)
		}
		return Value{Bytes: []byte(t.s)}, nil
	}
	s := strings.ToLower(strings.TrimSuffix(t.s, "."))
	if _, err := WireName(s); err != nil {
		return Value{}, p.fail(t.pos, "%v", err)
	}
	return Value{Bytes: []byte(s)}, nil
}

// MaxName is the maximum length of a compared domain name, in bytes in DNS encoding, and MaxLabels
// its maximum number of labels.
const (
	MaxName   = 255
	MaxLabels = 32
)

// WireName encodes a domain name for DNS messages (RFC 1035, 3.1). "" is the root.
func WireName(s string) ([]byte, error) {
	var out []byte
	labels := strings.Split(s, ".")
	if s == "" {
		labels = nil
	}
	if len(labels) > MaxLabels {
		return nil, fmt.Errorf("domain name has %d labels: want at most %d", len(labels), MaxLabels)
	}
	for _, l := range labels {
		if len(l) < 1 || len(l) > 63 {
			return nil, fmt.Errorf("a label of domain name %q has %d bytes: want 1 to 63", s, len(l))
		}
		out = append(append(out, byte(len(l))), l...)
	}
	out = append(out, 0)
	if len(out) > MaxName {
		return nil, fmt.Errorf("a domain name has at most %d bytes", MaxName)
	}
	return out, nil
}
