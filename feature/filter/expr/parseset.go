// SPDX-License-Identifier: Apache-2.0

package expr

import (
	"strconv"
	"strings"

	"github.com/weir-project/weir/internal/suggest"
)

// in parses a set, or the name of a list.
func (p *parser) in(here at, x Operand) (Node, *Error) {
	t := p.peek()
	if t.kind == word && strings.HasPrefix(t.s, "$") {
		return p.list(here, x)
	}
	if err := p.expect("{", " to begin a set, or $name for a list"); err != nil {
		return nil, err
	}
	if x.Type() == Proto {
		return nil, p.fail(t.pos, "%s is a protocol without a value, and in no set%s", x, suggestFields(x.Field))
	}
	n := &In{at: here, X: x}
	for {
		if p.accept("}") {
			break
		}
		if t := p.peek(); t.kind == end {
			return nil, p.fail(t.pos, "the set has no closing }")
		}
		t := p.peek()
		v, err := p.value(x)
		if err == nil {
			err = p.fits(x, v, t)
		}
		if err != nil {
			return nil, err
		}
		n.Set = append(n.Set, v)
		p.accept(",")
	}
	if len(n.Set) == 0 {
		return nil, p.fail(t.pos, "a set without members never matches")
	}
	return n, nil
}

func (p *parser) list(here at, x Operand) (Node, *Error) {
	t := p.next()
	switch x.Type() {
	case IPv4, IPv6, IP:
	default:
		return nil, p.fail(t.pos, "%s is not an address: lists hold prefixes", x)
	}
	name := t.s[1:]
	for i := range len(name) {
		if c := name[i]; !isWord(c) || c == ':' || c == '/' || c == '$' || c == '.' {
			return nil, p.fail(t.pos, "a list's name has letters, digits, - and _")
		}
	}
	if name == "" {
		return nil, p.fail(t.pos, "$ without a list name")
	}
	return &In{at: here, X: x, List: name}, nil
}

func (p *parser) contains(here at, x Operand) (Node, *Error) {
	if x.Type() != Bytes {
		return nil, p.fail(x.pos, "%s is not a byte sequence: contains applies to payload", x)
	}
	v, err := p.literal(p.next())
	if err != nil {
		return nil, err
	}
	return &Contains{here, x, v.Bytes}, nil
}

func (p *parser) matches(here at, x Operand) (Node, *Error) {
	t := p.next()
	if x.Type() != Bytes {
		return nil, p.fail(x.pos, "%s is not a byte sequence: matches applies to payload", x)
	}
	if t.kind != text {
		return nil, p.fail(t.pos, "got %s, want a pattern in quotes", t)
	}
	pattern, err := newPattern(t.s)
	if err != nil {
		return nil, p.fail(t.pos, "%v", err)
	}
	return &Matches{here, x, pattern}, nil
}

// slice continues after "[": a:b, a:, :b, a or a-b.
func (p *parser) slice(x *Operand) *Error {
	open := p.peek()
	if x.Field.Type != Bytes {
		return p.fail(open.pos-1, "%s has no bytes to select: […] applies to payload", x.Field.Name)
	}
	var b strings.Builder
	for !p.accept("]") {
		t := p.next()
		if t.kind != word {
			return p.fail(t.pos, "got %s, want [from:to], [from:], [:to] or [at]", t)
		}
		b.WriteString(t.s)
	}
	from, to, cut := strings.Cut(b.String(), ":")
	var err *Error
	if first, last, ok := strings.Cut(from, "-"); ok && !cut && first != "" {
		return p.inclusive(open, x, first, last)
	}
	if from != "" || !cut {
		if x.From, err = p.offset(open, from); err != nil {
			return err
		}
	}
	x.Part = Byte
	if !cut {
		return nil
	}
	x.Part, x.Open = Slice, to == ""
	if !x.Open {
		if x.To, err = p.offset(open, to); err != nil {
			return err
		}
	}
	switch n, fixed := x.Size(); {
	case x.Open && x.From == 0:
		x.Part, x.Open = Whole, false // the whole payload
	case fixed && n <= 0, !x.Open && x.To == 0:
		return p.fail(open.pos, "the slice from %d up to, excluding, %d has no byte: slices are [from:to], not [from:length]", x.From, x.To)
	}
	return nil
}

// inclusive parses [first-last], Wireshark's other notation for slices.
func (p *parser) inclusive(at token, x *Operand, first, last string) (err *Error) {
	if x.From, err = p.offset(at, first); err != nil {
		return err
	}
	if x.To, err = p.offset(at, last); err != nil {
		return err
	}
	if x.To < x.From {
		return p.fail(at.pos, "the slice from %d to %d has no byte", x.From, x.To)
	}
	x.Part = Slice
	x.To++
	return nil
}

func (p *parser) offset(at token, s string) (int, *Error) {
	n, err := strconv.Atoi(s)
	if err != nil || n < -maxOffset || n > maxOffset || s == "-0" || s[0] == '+' {
		return 0, p.fail(at.pos, "got %q, want a byte offset, from 0, or up to -1 from the end, at most %d", s, maxOffset)
	}
	return n, nil
}

var periods = []struct {
	name string
	ns   uint64
}{{"s", 1e9}, {"m", 60e9}, {"h", 3600e9}}

func perName(ns uint64) string {
	for _, p := range periods {
		if p.ns == ns {
			return p.name
		}
	}
	return strconv.FormatUint(ns, 10) + "ns" // not from a parser
}

// keys parses the fields of rate(…).
func (p *parser) keys(t token) (*Rate, *Error) {
	p.next()
	r := &Rate{at: at{t.pos}, Index: p.rates}
	if p.rates++; p.rates > maxRates {
		return nil, p.fail(t.pos, "more than %d rates in one expression", maxRates)
	}
	size := 0
	for {
		f := p.next()
		switch {
		case f.kind != word:
			e := p.fail(f.pos, "got %s, want a field: packets are counted for each of its values", f)
			e.Suggestion = "rate(net.src)"
			return nil, e
		case byName[f.s] == nil:
			return nil, p.unknown(f)
		}
		x := Operand{Field: byName[f.s], pos: f.pos}
		n := KeySize(x.Field)
		if n == 0 {
			return nil, p.fail(f.pos, "%s cannot be the key of a rate: want a field with one number or address per packet", f.s)
		}
		size += n
		r.Keys = append(r.Keys, x)
		if p.accept(")") {
			break
		}
		if err := p.expect(",", " or )"); err != nil {
			return nil, err
		}
	}
	if size > maxKey {
		return nil, p.fail(t.pos, "the fields of a rate have %d bytes: want at most %d", size, maxKey)
	}
	return r, nil
}

// maxKey is the maximum length of a rate's key in bytes.
const maxKey = 64

// KeySize returns the bytes of a field in the key of a rate: 4 for a number or an IPv4 address, 8
// for a MAC address, 16 for IPv6, 20 for either family. It returns 0 for fields unsuited to a key.
func KeySize(f *Field) int {
	switch f.Type {
	case Bool, Uint:
		if len(f.Of) == 0 || f.ID == NetSrcPort || f.ID == NetDstPort {
			return 4
		}
	case MAC:
		if len(f.Of) == 0 {
			return 8
		}
	case IPv4:
		if len(f.Of) == 0 {
			return 4
		}
	case IPv6:
		if len(f.Of) == 0 {
			return 16
		}
	case IP:
		if f.ID == NetSrc || f.ID == NetDst {
			return 20
		}
	}
	return 0
}

// maxRate is the maximum limit of a rate: the interval between packets has whole nanoseconds.
const maxRate = 10_000_000 // a second

// rate continues after rate(…): "> 100/s".
func (p *parser) rate(r *Rate) (Node, *Error) {
	t := p.next()
	switch t.s {
	case ">", "gt":
	case "<=", "le":
		r.Not = true
	default:
		return nil, p.fail(t.pos, "got %s, want > or <= and a rate like 100/s", t)
	}
	t = p.next()
	n, per, ok := strings.Cut(t.s, "/")
	limit, err := strconv.ParseUint(n, 10, 64)
	if t.kind != word || !ok || err != nil || limit == 0 {
		e := p.fail(t.pos, "got %s, want a rate like 100/s: packets, and /s, /m or /h", t)
		if _, err := strconv.ParseUint(t.s, 10, 32); err == nil && t.s != "0" {
			e.Suggestion = t.s + "/s"
		}
		return nil, e
	}
	names := []string{}
	for _, q := range periods {
		if names = append(names, q.name); q.name == per {
			r.Per = q.ns
		}
	}
	if r.Per == 0 {
		e := p.fail(t.pos, "a rate is per second, minute or hour: /s, /m or /h")
		e.Suggestion = suggest.Nearest(per, names)
		return nil, e
	}
	if limit > maxRate*(r.Per/1e9) {
		return nil, p.fail(t.pos, "the rate exceeds %d/s", maxRate)
	}
	r.Limit = limit
	return r, nil
}
