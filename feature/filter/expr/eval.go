// SPDX-License-Identifier: Apache-2.0

package expr

import (
	"bytes"
	"fmt"
	"net/netip"
	"time"
)

// Set is a list of prefixes for Env.
type Set interface{ Contains(netip.Addr) bool }

// Env has the state of an expression beside the packet. It is not safe for concurrent use.
type Env struct {
	Lists map[string]Set
	// Now is the clock of rates, in nanoseconds from any origin; nil: the monotonic clock.
	Now func() uint64

	buckets map[string]uint64 // by key of a rate: time of the full bucket
}

var started = time.Now()

// Eval reports whether a packet matches. It treats lists as empty and each packet as the first of
// its rate. Use an Env for expressions with lists or rates, see [Env.EvalAll].
func (e *Expr) Eval(p *Packet) bool { return new(Env).eval(e, p) }

// eval reports whether a packet matches. Rates continue over calls.
func (v *Env) eval(e *Expr, p *Packet) bool {
	return (&run{v, e, dissect(p)}).node(e.Root)
}

// EvalRules is EvalAll for rules. unreadable returns a rule's treatment of fields of an unreadable
// transport header.
func (v *Env) EvalRules(es []*Expr, p *Packet, unreadable func(i int) Unreadable, matched func(i int) (stop bool)) int {
	l := dissect(p)
	for i, e := range es {
		if (&run{v, e, l}).rule(unreadable(i)) && matched(i) {
			return i
		}
	}
	return len(es)
}

// EvalAll evaluates expressions in turn for one packet, like the rules of a filter. It calls
// matched for each match, and ends if matched returns true. It returns the index of the deciding
// expression, or len(es).
func (v *Env) EvalAll(es []*Expr, p *Packet, matched func(i int) (stop bool)) int {
	l := dissect(p)
	for i, e := range es {
		if (&run{v, e, l}).node(e.Root) && matched(i) {
			return i
		}
	}
	return len(es)
}

type run struct {
	env *Env
	e   *Expr
	l   *layers
}

func (r *run) node(n Node) bool {
	switch n := n.(type) {
	case *And:
		for _, x := range n.X {
			if !r.node(x) {
				return false
			}
		}
		return true
	case *Or:
		for _, x := range n.X {
			if r.node(x) {
				return true
			}
		}
		return false
	case *Xor:
		odd := false
		for _, x := range n.X {
			odd = r.node(x) != odd
		}
		return odd
	case *Not:
		return !r.node(n.X)
	case *Rate:
		return r.rate(n)
	}
	return r.term(n)
}

func (r *run) term(n Node) bool {
	switch n := n.(type) {
	case *Present:
		return r.present(n.X)
	case *Test:
		return r.any(n.X, func(v uint64) bool { return v != 0 }, nil)
	case *Compare:
		return r.compare(n)
	case *In:
		if n.List != "" {
			s := r.env.Lists[n.List]
			return s != nil && r.any(n.X, nil, s.Contains)
		}
		for _, v := range n.Set {
			if r.compare(&Compare{X: n.X, Op: Eq, V: v}) {
				return true
			}
		}
		return false
	case *Contains:
		b, ok := r.slice(n.X)
		return ok && bytes.Contains(r.l.seen(window(b)), n.V)
	case *Matches:
		b, ok := r.slice(n.X)
		b = window(b)
		if !r.l.sees(b, len(b)) && n.Pattern.atEnd() {
			return false
		}
		return ok && n.Pattern.match(r.l.seen(b))
	}
	panic(fmt.Sprintf("expr: no such node: %T", n))
}

func window(b []byte) []byte { return b[:min(len(b), Window)] }

func (r *run) present(x Operand) bool {
	switch {
	case x.Part == Length:
		return !r.l.noPayload
	case x.Part == Byte:
		_, ok := r.byte(x)
		return ok
	case x.Part == Slice:
		_, ok := r.slice(x)
		return ok
	case x.Field.Type == Bool:
		return r.any(x, func(v uint64) bool { return v == 1 }, nil)
	}
	for _, id := range x.Field.Each() {
		if r.l.there(id) {
			return true
		}
	}
	return false
}

// any reports whether one of the operand's numbers or addresses fulfils the predicate.
func (r *run) any(x Operand, number func(uint64) bool, address func(netip.Addr) bool) bool {
	mask := x.Mask
	if mask == 0 {
		mask = ^uint64(0)
	}
	switch x.Part {
	case Byte:
		b, ok := r.byte(x)
		return ok && number(uint64(b)&mask)
	case Length:
		return !r.l.noPayload && number(uint64(len(r.l.payload))&mask)
	}
	for _, id := range x.Field.Each() {
		if address != nil {
			if a, ok := r.l.address(id); ok && address(a) {
				return true
			}
		} else if v, ok := r.l.number(id); ok && number(v&mask) {
			return true
		}
	}
	return false
}

func (r *run) compare(n *Compare) bool {
	if n.Op == Ne { // true for absent fields too
		return !r.compare(&Compare{X: n.X, Op: Eq, V: n.V})
	}
	switch n.X.Type() {
	case Bytes:
		b, ok := r.bytes(n.X)
		return ok && bytes.Equal(b, n.V.Bytes)
	case Name:
		return r.name(n)
	case IPv4, IPv6, IP:
		return r.any(n.X, nil, func(a netip.Addr) bool { return compareAddress(a, n.Op, n.V) })
	}
	return r.any(n.X, func(v uint64) bool {
		switch n.Op {
		case Lt:
			return v < n.V.Lo
		case Le:
			return v <= n.V.Lo
		case Gt:
			return v > n.V.Lo
		case Ge:
			return v >= n.V.Lo
		}
		return v >= n.V.Lo && v <= n.V.Hi
	}, nil)
}

func compareAddress(a netip.Addr, op Op, v Value) bool {
	if op == Eq {
		if v.From.IsValid() {
			return a.Is4() == v.From.Is4() && a.Compare(v.From) >= 0 && a.Compare(v.To) <= 0
		}
		return v.Prefix.Contains(a)
	}
	switch c := a.Compare(v.Prefix.Addr()); op {
	case Lt:
		return c < 0
	case Le:
		return c <= 0
	case Gt:
		return c > 0
	default:
		return c >= 0
	}
}

func (r *run) name(n *Compare) bool {
	if n.X.Field.ID == SIPMethod {
		m, ok := r.l.method()
		return ok && bytes.Equal(m, n.V.Bytes)
	}
	name, _, ok := r.l.question()
	want, err := WireName(string(n.V.Bytes))
	return ok && err == nil && len(name) == len(want) && bytes.Equal(lower(name), lower(want))
}

// lower folds ASCII case (RFC 4343). Label lengths are at most 63 and so no letters.
func lower(b []byte) []byte {
	out := bytes.Clone(b)
	for i, c := range out {
		if c >= 'A' && c <= 'Z' {
			out[i] = c + 'a' - 'A'
		}
	}
	return out
}

// offsetIn converts an offset in a slice of n bytes to one from the start.
func offsetIn(n, i int) int {
	if i < 0 {
		return n + i
	}
	return i
}

func (r *run) byte(x Operand) (byte, bool) {
	i := offsetIn(len(r.l.payload), x.From)
	if r.l.noPayload || i < 0 || i >= len(r.l.payload) || !r.l.sees(r.l.payload, i+1) {
		return 0, false
	}
	return r.l.payload[i], true
}

// bytes returns the bytes of a slice, or false if the capture lacks any of them.
func (r *run) bytes(x Operand) ([]byte, bool) {
	b, ok := r.slice(x)
	return b, ok && r.l.sees(b, len(b))
}

// slice returns the bytes of a slice, or false if it exceeds the payload. An open slice extends to
// the payload's end and may be empty.
func (r *run) slice(x Operand) ([]byte, bool) {
	b := r.l.payload
	if r.l.noPayload || x.Part == Whole {
		return b, !r.l.noPayload
	}
	from, to := offsetIn(len(b), x.From), offsetIn(len(b), x.To)
	if x.Open {
		to = len(b)
	}
	if from < 0 || to > len(b) || from > to {
		return nil, false
	}
	return b[from:to], true
}

// rate counts the packet for its key.
func (r *run) rate(n *Rate) bool {
	key := []byte(fmt.Sprintf("%p/%d/", r.e, n.Index))
	for _, k := range n.Keys {
		part, ok := r.key(k.Field)
		if !ok {
			return false
		}
		key = append(key, part...)
	}
	now := uint64(time.Since(started))
	if r.env.Now != nil {
		now = r.env.Now()
	}
	if r.env.buckets == nil {
		r.env.buckets = map[string]uint64{}
	}
	full, above := n.next(r.env.buckets[string(key)], now)
	r.env.buckets[string(key)] = full
	return above != n.Not
}

func (r *run) key(f *Field) ([]byte, bool) {
	for _, id := range f.Each() {
		if a, ok := r.l.address(id); ok {
			b := a.As16()
			return append([]byte{byte(a.BitLen())}, b[:]...), true
		}
		if v, ok := r.l.number(id); ok {
			return be.AppendUint64(nil, v), true
		}
	}
	return nil, false
}
