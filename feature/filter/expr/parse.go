// SPDX-License-Identifier: Apache-2.0

package expr

import (
	"fmt"

	"github.com/weir-project/weir/internal/suggest"
)

const (
	maxSource = 1 << 20 // bytes of an expression
	maxDepth  = 64      // nested brackets and nots
	maxNodes  = 4096    // of a tree
	maxRates  = 8       // of an expression
)

// Parse parses an expression. Errors are of type [*Error].
func Parse(src string) (*Expr, error) {
	e, err := parse(src)
	if err != nil {
		return nil, err
	}
	return e, nil
}

// MustParse is Parse for constant expressions: it panics on errors.
func MustParse(src string) *Expr {
	e, err := Parse(src)
	if err != nil {
		panic(err)
	}
	return e
}

type parser struct {
	src   string
	t     []token
	i     int
	deep  int
	nodes int
	rates int
}

func parse(src string) (*Expr, *Error) {
	if len(src) > maxSource {
		return nil, &Error{Source: src, Pos: maxSource, Msg: "an expression has at most 1 MiB: move long sets to a list and use in $name"}
	}
	t, err := lex(src)
	if err != nil {
		return nil, err
	}
	p := &parser{src: src, t: t}
	n, err := p.or()
	if err != nil {
		return nil, err
	}
	if t := p.peek(); t.kind != end {
		return nil, p.trailing(t)
	}
	return &Expr{Root: n, Source: src}, nil
}

func (p *parser) peek() token { return p.t[p.i] }

func (p *parser) next() token {
	t := p.t[p.i]
	if t.kind != end {
		p.i++
	}
	return t
}

// accept skips the next token if it is one of words, and reports whether it was.
func (p *parser) accept(words ...string) bool {
	t := p.peek()
	if t.kind == text || t.kind == end {
		return false
	}
	for _, w := range words {
		if t.s == w {
			p.i++
			return true
		}
	}
	return false
}

func (p *parser) fail(at Pos, format string, args ...any) *Error {
	return &Error{Source: p.src, Pos: at, Msg: fmt.Sprintf(format, args...)}
}

func (p *parser) expect(s, why string) *Error {
	if p.accept(s) {
		return nil
	}
	t := p.peek()
	return p.fail(t.pos, "got %s, want %s%s", t, s, why)
}

var joiners = []string{"and", "or", "xor", "not", "in", "contains", "matches", "eq", "ne", "lt", "le", "gt", "ge"}

func (p *parser) trailing(t token) *Error {
	e := p.fail(t.pos, "got %s, want the end of the expression, or and, or, xor", t)
	switch hint, ok := foreign[t.s]; {
	case t.kind == word && ok:
		e.Msg += ": " + hint
	case t.kind == word:
		e.Suggestion = suggest.Nearest(t.s, joiners)
	case t.kind == symbol && t.s == ",":
		e.Msg += ": match one of several by in {a, b}"
	}
	return e
}

func (p *parser) or() (Node, *Error) {
	return p.chain(p.xor, func(a at, x []Node) Node { return &Or{a, x} }, "or", "||")
}

func (p *parser) xor() (Node, *Error) {
	return p.chain(p.and, func(a at, x []Node) Node { return &Xor{a, x} }, "xor", "^^")
}

func (p *parser) and() (Node, *Error) {
	return p.chain(p.unary, func(a at, x []Node) Node { return &And{a, x} }, "and", "&&")
}

// chain parses any number of operands joined by one operator.
func (p *parser) chain(operand func() (Node, *Error), join func(at, []Node) Node, op ...string) (Node, *Error) {
	first, err := operand()
	if err != nil {
		return nil, err
	}
	all := []Node{first}
	for p.accept(op...) {
		n, err := operand()
		if err != nil {
			return nil, err
		}
		all = append(all, n)
	}
	if len(all) == 1 {
		return first, nil
	}
	return join(at{first.Pos()}, all), nil
}

func (p *parser) enter(t token) *Error {
	if p.deep++; p.deep > maxDepth {
		return p.fail(t.pos, "more than %d nested brackets and nots", maxDepth)
	}
	return nil
}

func (p *parser) unary() (Node, *Error) {
	t := p.peek()
	if p.nodes++; p.nodes > maxNodes {
		return nil, p.fail(t.pos, "more than %d terms: split it into several rules, or use a set", maxNodes)
	}
	if p.accept("not", "!") {
		if err := p.enter(t); err != nil {
			return nil, err
		}
		defer func() { p.deep-- }()
		x, err := p.unary()
		if err != nil {
			return nil, err
		}
		return &Not{at{t.pos}, x}, nil
	}
	if p.accept("(") {
		return p.bracket(t)
	}
	x, err := p.operand()
	if err != nil {
		return nil, err
	}
	if x.rate != nil {
		return p.rate(x.rate)
	}
	return p.term(x.Operand)
}

// bracket continues after "(": an expression, or the operand of a comparison, as in (tcp.flags &
// 0x3f) == 2.
func (p *parser) bracket(open token) (Node, *Error) {
	if err := p.enter(open); err != nil {
		return nil, err
	}
	defer func() { p.deep-- }()
	n, err := p.or()
	if err != nil {
		return nil, err
	}
	if err := p.expect(")", ""); err != nil {
		return nil, err
	}
	if !p.compares() {
		return n, nil
	}
	var x Operand
	switch n := n.(type) {
	case *Test:
		x = n.X
	case *Present:
		x = n.X
	default:
		return nil, p.fail(p.peek().pos, "the bracket is true or false and cannot be compared")
	}
	return p.term(x)
}

// compares reports whether the next token continues a comparison.
func (p *parser) compares() bool {
	t := p.peek()
	if t.kind != word && t.kind != symbol {
		return false
	}
	if _, ok := opWords[t.s]; ok {
		return true
	}
	switch t.s {
	case "in", "contains", "matches", "~", "&":
		return true
	case "not":
		return p.i+1 < len(p.t) && p.t[p.i+1].kind == word && p.t[p.i+1].s == "in"
	}
	return false
}

// term continues after an operand.
func (p *parser) term(x Operand) (Node, *Error) {
	here := at{x.pos}
	if p.peek().s == "&" && p.peek().kind == symbol {
		if err := p.mask(&x); err != nil {
			return nil, err
		}
		if !p.compares() {
			return &Test{here, x}, nil
		}
	}
	t := p.peek()
	if t.kind == word || t.kind == symbol {
		if op, ok := opWords[t.s]; ok {
			p.next()
			return p.compare(here, x, op)
		}
	}
	switch {
	case p.accept("in"):
		return p.in(here, x)
	case p.accept("contains"):
		return p.contains(here, x)
	case p.accept("matches", "~"):
		return p.matches(here, x)
	}
	if p.accept("not") {
		if !p.accept("in") {
			return nil, p.fail(p.peek().pos, "got %s, want in: FIELD not in {…}", p.peek())
		}
		n, err := p.in(here, x)
		if err != nil {
			return nil, err
		}
		return &Not{here, n}, nil
	}
	if x.Mask != 0 {
		return &Test{here, x}, nil
	}
	return &Present{here, x}, nil
}

// mask parses "& bits".
func (p *parser) mask(x *Operand) *Error {
	t := p.next()
	if x.Type() != Uint && x.Type() != Bool {
		return p.fail(t.pos, "%s has no bits to test: & applies to numbers", x)
	}
	if x.Mask != 0 {
		return p.fail(t.pos, "more than one &: combine the masks into one")
	}
	v := p.next()
	m, err := p.number(v, x.Bits(), *x)
	if err != nil {
		return err
	}
	if m == 0 {
		return p.fail(v.pos, "the mask has no bits and never matches")
	}
	x.Mask = m
	return nil
}

// subject is the beginning of a term: an operand, or the keys of a rate.
type subject struct {
	Operand
	rate *Rate
}

func (p *parser) operand() (subject, *Error) {
	t := p.next()
	switch {
	case t.kind == end:
		return subject{}, p.fail(t.pos, "the expression ends here: want a field")
	case t.kind != word:
		return subject{}, p.fail(t.pos, "got %s, want a field", t)
	case t.s == "rate" && p.peek().s == "(":
		r, err := p.keys(t)
		return subject{rate: r}, err
	case t.s == "len" && p.peek().s == "(":
		x, err := p.length(t)
		return subject{Operand: x}, err
	}
	x, err := p.field(t)
	return subject{Operand: x}, err
}

func (p *parser) field(t token) (Operand, *Error) {
	f := byName[t.s]
	if f == nil {
		return Operand{}, p.unknown(t)
	}
	x := Operand{Field: f, pos: t.pos}
	if p.peek().kind == symbol && p.accept("[") {
		return x, p.slice(&x)
	}
	return x, nil
}

func (p *parser) unknown(t token) *Error {
	if hint, ok := foreign[t.s]; ok {
		return p.fail(t.pos, "there is no field %q: %s", t.s, hint)
	}
	e := p.fail(t.pos, "unknown field %q", t.s)
	if e.Suggestion = meant(t.s); e.Suggestion == "" {
		e.Suggestion = nearest(t.s)
	}
	for _, j := range joiners {
		if t.s == j {
			e.Msg, e.Suggestion = fmt.Sprintf("got %s, want a field", t.s), ""
		}
	}
	return e
}

func (p *parser) length(t token) (Operand, *Error) {
	p.next()
	f := p.next()
	if f.kind != word || byName[f.s] == nil || byName[f.s].Type != Bytes {
		return Operand{}, p.fail(f.pos, "got %s, want len(payload)", f)
	}
	return Operand{Field: byName[f.s], Part: Length, pos: t.pos}, p.expect(")", " to end len()")
}
