// SPDX-License-Identifier: Apache-2.0

package filtertest

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strconv"
	"strings"

	"github.com/weir-project/weir/feature/filter/expr"
)

// ListName is the list used by random expressions, with the prefixes of List.
const ListName = "some"

// List is the contents of $some.
var List = []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16"), netip.MustParsePrefix("192.0.2.1/32"),
	netip.MustParsePrefix("2001:db8::/64"), netip.MustParsePrefix("fe80::/10")}

// Kinds selects elements of random expressions.
type Kinds struct {
	Link  bool // fields of the link layer
	Lists bool // $some
	Rates bool
	Costs bool // expensive to verify: patterns, TCP options, DNS names
}

// Expr returns a random expression.
func Expr(r *rand.Rand, k Kinds) *expr.Expr {
	deep := 1 + r.IntN(3)
	if k.Rates {
		deep = 1 // an expression may have few
	}
	s := text(r, k, deep)
	e, err := expr.Parse(s)
	if err != nil {
		panic(fmt.Sprintf("filtertest: %q: %v", s, err)) // a bug of the generator
	}
	return e
}

func text(r *rand.Rand, k Kinds, deep int) string {
	if deep == 0 {
		return term(r, k)
	}
	switch r.IntN(8) {
	case 0:
		return "not (" + text(r, k, deep-1) + ")"
	case 1, 2, 3, 4, 5, 6:
		op := pick(r, []string{" and ", " and ", " or ", " or ", " xor "})
		parts := make([]string, 2+r.IntN(3))
		for i := range parts {
			parts[i] = "(" + text(r, k, deep-1) + ")"
		}
		return strings.Join(parts, op)
	}
	return term(r, k)
}

var (
	fields  = expr.Fields()
	literal = []string{`"xyzzy"`, `"INVITE"`, `"x"`, `"hello xyzzy"`, `"abc"`, `16:03:01`, `"abcabcabcd"`, `"SIP/2.0"`, `" "`}
	pattern = []string{`"^hello"`, `"xyz+y$"`, `"[a-c]+d"`, `"a.c"`, `"sip:.*SIP"`, `"(INVITE|ACK) "`, `"^$"`, `"x?y*z"`, `"\\x16\\x03[\\x00-\\x03]"`, `"[^a-z]{3,5}"`, `"\\r\\n\\r\\n$"`, `"(?i)HELLO|[hH]ost"`, `"(?i:get) /"`}
)

func term(r *rand.Rand, k Kinds) string {
	if k.Rates && one(r, 6) {
		// Slow rates: no bucket fills during a comparison.
		return fmt.Sprintf("rate(%s) %s %d/%s", pick(r, []string{"ip.src", "net.src", "net.src, udp.dstport", "ip.ttl, tcp.dstport", "tcp.flags.syn", "net.dstport, net.dst", "ipv6.src, ipv6.dst"}),
			pick(r, []string{">", "<="}), pick(r, []int{1, 2, 5, 10}), pick(r, []string{"m", "h"}))
	}
	for {
		f := pick(r, fields)
		if f.Link && !k.Link || !k.Costs && costs(f) {
			continue
		}
		if one(r, 10) {
			return f.Name
		}
		switch f.Type {
		case expr.Proto:
			return f.Name
		case expr.Uint, expr.Bool:
			return number(r, f)
		case expr.MAC:
			return fmt.Sprintf("%s %s 02:00:00:00:00:0%d", f.Name, pick(r, []string{"==", "!="}), r.IntN(3))
		case expr.IPv4, expr.IPv6, expr.IP:
			return address(r, k, f)
		case expr.Bytes:
			return bytesTerm(r, k, f)
		}
		return name(r, f)
	}
}

func costs(f expr.Field) bool {
	return strings.HasPrefix(f.Name, "tcp.options") || f.ID == expr.DNSType || f.ID == expr.DNSName || f.ID == expr.SIPMethod
}

func number(r *rand.Rand, f expr.Field) string {
	most := uint64(1)<<f.Bits - 1
	v := func() uint64 {
		if one(r, 3) {
			return r.Uint64() & most
		}
		return uint64(pick(r, []int{0, 1, 2, 5, 6, 7, 17, 20, 28, 53, 64, 80, 255, 443, 1460, 5060, 0x800, 0x12, 0x8100, 24})) & most
	}
	x := f.Name
	if one(r, 4) {
		m := max(v(), 1)
		if one(r, 2) {
			return fmt.Sprintf("%s & %d", x, m)
		}
		x = fmt.Sprintf("(%s & %d)", x, m)
	}
	if one(r, 4) {
		members := make([]string, 1+r.IntN(9))
		for i := range members {
			a, b := v(), v()
			members[i] = strconv.FormatUint(a, 10)
			if one(r, 3) {
				members[i] = fmt.Sprintf("%d..%d", min(a, b), max(a, b))
			}
		}
		return fmt.Sprintf("%s in {%s}", x, strings.Join(members, " "))
	}
	if a, b := v(), v(); one(r, 6) {
		return fmt.Sprintf("%s %s %d..%d", x, pick(r, []string{"==", "!="}), min(a, b), max(a, b))
	}
	return fmt.Sprintf("%s %s %d", x, pick(r, []string{"==", "!=", "<", "<=", ">", ">=", "==", "=="}), v())
}

func address(r *rand.Rand, k Kinds, f expr.Field) string {
	any := func() netip.Addr {
		if f.Type == expr.IPv6 || f.Type == expr.IP && one(r, 2) {
			return netip.AddrFrom16([16]byte([]byte(pick(r, addrs6))))
		}
		return netip.AddrFrom4(pick(r, addrs4))
	}
	prefix := func() string {
		a := any()
		return netip.PrefixFrom(a, r.IntN(a.BitLen()+1)).Masked().String()
	}
	switch r.IntN(6) {
	case 0:
		if k.Lists {
			return f.Name + " in $" + ListName
		}
	case 1:
		return fmt.Sprintf("%s %s %s", f.Name, pick(r, []string{"==", "!="}), prefix())
	case 2, 3:
		members := make([]string, 1+r.IntN(9))
		for i := range members {
			members[i] = pick(r, []string{prefix(), any().String()})
			a, b := any(), any()
			if one(r, 3) && a.Is4() == b.Is4() {
				if b.Less(a) {
					a, b = b, a
				}
				members[i] = a.String() + ".." + b.String()
			}
		}
		return fmt.Sprintf("%s in {%s}", f.Name, strings.Join(members, " "))
	case 4:
		if f.Type != expr.IP {
			return fmt.Sprintf("%s %s %s", f.Name, pick(r, []string{"<", "<=", ">", ">="}), any())
		}
	}
	return fmt.Sprintf("%s %s %s", f.Name, pick(r, []string{"==", "!="}), any())
}

func bytesTerm(r *rand.Rand, k Kinds, f expr.Field) string {
	switch r.IntN(8) {
	case 0:
		return fmt.Sprintf("%s[%d] %s %d", f.Name, r.IntN(24)-12, pick(r, []string{"==", "!=", "<", ">", "&"}), 1+r.IntN(255))
	case 1:
		return fmt.Sprintf("len(%s) %s %d", f.Name, pick(r, []string{"==", "<", ">="}), r.IntN(64))
	case 2, 3:
		if !k.Costs {
			break
		}
		x := f.Name + pick(r, []string{"", "", "[2:]", "[-8:]", "[1:-1]", "[0:300]", "[5:9]"})
		if one(r, 2) {
			return x + " contains " + pick(r, literal)
		}
		return x + " matches " + pick(r, pattern)
	}
	l := pick(r, literal)
	e := expr.MustParse("payload == " + l)
	n := len(e.Root.(*expr.Compare).V.Bytes)
	from := r.IntN(12)
	x := pick(r, []string{"payload", fmt.Sprintf("payload[%d:]", from), fmt.Sprintf("payload[-%d:]", n), fmt.Sprintf("payload[%d:%d]", from, from+n),
		fmt.Sprintf("payload[%d:-%d]", from, 1+r.IntN(6)), fmt.Sprintf("payload[-%d:%d]", n+r.IntN(4), 5+r.IntN(9)), fmt.Sprintf("payload[-%d:-%d]", n+1+from, 1+from)})
	if one(r, 4) {
		return x + " in {" + l + "}"
	}
	return x + pick(r, []string{" == ", " == ", " != "}) + l
}

func name(r *rand.Rand, f expr.Field) string {
	of := []string{`"INVITE"`, `"ACK"`, `"REGISTER"`}
	if f.ID == expr.DNSName {
		of = []string{`"example.com"`, `"www.EXAMPLE.com"`, `"."`, `"short"`, `""`}
	}
	if one(r, 3) {
		return fmt.Sprintf("%s in {%s %s}", f.Name, pick(r, of), pick(r, of))
	}
	return fmt.Sprintf("%s %s %s", f.Name, pick(r, []string{"==", "!="}), pick(r, of))
}
