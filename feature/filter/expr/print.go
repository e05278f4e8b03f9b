// SPDX-License-Identifier: Apache-2.0

package expr

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// String returns the canonical form, which parses to the same tree.
func (e *Expr) String() string { return Print(e.Root) }

// Print returns the canonical form of a tree.
func Print(n Node) string {
	var b strings.Builder
	write(&b, n, 0)
	return b.String()
}

// Binding strengths of operators.
const (
	bindOr = iota + 1
	bindXor
	bindAnd
	bindNot
	bindTerm
)

func binds(n Node) int {
	switch n.(type) {
	case *Or:
		return bindOr
	case *Xor:
		return bindXor
	case *And:
		return bindAnd
	case *Not:
		return bindNot
	}
	return bindTerm
}

// write prints n as an operand of an operator with strength least, in parentheses if it binds less.
func write(b *strings.Builder, n Node, least int) {
	if binds(n) < least {
		b.WriteByte('(')
		defer b.WriteByte(')')
	}
	switch n := n.(type) {
	case *Or:
		writeAll(b, n.X, " or ", bindXor)
	case *Xor:
		writeAll(b, n.X, " xor ", bindAnd)
	case *And:
		writeAll(b, n.X, " and ", bindNot)
	case *Not:
		b.WriteString("not ")
		write(b, n.X, bindNot)
	case *Present:
		b.WriteString(n.X.String())
	case *Compare:
		fmt.Fprintf(b, "%s %s %s", n.X, n.Op, n.X.value(n.V))
	case *In:
		fmt.Fprintf(b, "%s in %s", n.X, n.set())
	case *Test:
		x := n.X
		x.Mask = 0
		fmt.Fprintf(b, "%s & %#x", x, n.X.Mask)
	case *Contains:
		fmt.Fprintf(b, "%s contains %s", n.X, quote(n.V))
	case *Matches:
		fmt.Fprintf(b, "%s matches %s", n.X, quote([]byte(n.Pattern.Text)))
	case *Rate:
		b.WriteString(n.String())
	}
}

func writeAll(b *strings.Builder, l []Node, between string, least int) {
	for i, n := range l {
		if i > 0 {
			b.WriteString(between)
		}
		write(b, n, least)
	}
}

// String returns the canonical form of an operand.
func (o Operand) String() string {
	s := o.Field.Name
	switch o.Part {
	case Byte:
		s = fmt.Sprintf("%s[%d]", s, o.From)
	case Slice:
		to := ""
		if !o.Open {
			to = strconv.Itoa(o.To)
		}
		s = fmt.Sprintf("%s[%d:%s]", s, o.From, to)
	case Length:
		s = "len(" + s + ")"
	}
	if o.Mask != 0 {
		s = fmt.Sprintf("(%s & %#x)", s, o.Mask)
	}
	return s
}

func (n *In) set() string {
	if n.List != "" {
		return "$" + n.List
	}
	words := make([]string, len(n.Set))
	for i, v := range n.Set {
		words[i] = n.X.value(v)
	}
	return "{" + strings.Join(words, " ") + "}"
}

// String returns the canonical form of a rate.
func (n *Rate) String() string {
	keys := make([]string, len(n.Keys))
	for i, k := range n.Keys {
		keys[i] = k.String()
	}
	op := ">"
	if n.Not {
		op = "<="
	}
	return fmt.Sprintf("rate(%s) %s %d/%s", strings.Join(keys, ", "), op, n.Limit, perName(n.Per))
}

// value returns the canonical form of a value for the operand.
func (o Operand) value(v Value) string {
	switch o.Type() {
	case Uint, Bool:
		if v.Lo != v.Hi {
			return o.number(v.Lo) + ".." + o.number(v.Hi)
		}
		return o.number(v.Lo)
	case MAC:
		if v.Lo != v.Hi {
			return mac(v.Lo) + ".." + mac(v.Hi)
		}
		return mac(v.Lo)
	case IPv4, IPv6, IP:
		if v.From.IsValid() {
			return v.From.String() + ".." + v.To.String()
		}
		return prefixString(v.Prefix)
	}
	return quote(v.Bytes)
}

func prefixString(p netip.Prefix) string {
	if p.IsSingleIP() {
		return p.Addr().String()
	}
	return p.String()
}

func (o Operand) number(v uint64) string {
	if o.Part == Byte || o.Part == Whole && o.Field.Hex || o.Mask != 0 {
		return fmt.Sprintf("%#x", v)
	}
	return strconv.FormatUint(v, 10)
}

func mac(v uint64) string {
	return fmt.Sprintf("%02x:%02x:%02x:%02x:%02x:%02x", v>>40&255, v>>32&255, v>>24&255, v>>16&255, v>>8&255, v&255)
}
