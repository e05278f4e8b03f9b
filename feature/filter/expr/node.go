// SPDX-License-Identifier: Apache-2.0

package expr

import "net/netip"

// Expr is a parsed expression. It is immutable and safe for concurrent use.
type Expr struct {
	Root   Node
	Source string // as parsed
}

// Node is a node of the tree: one of the types below, immutable after parsing.
type Node interface {
	Pos() Pos
	node()
}

type at struct{ pos Pos }

// Pos returns the node's position in the source.
func (a at) Pos() Pos { return a.pos }
func (at) node()      {}

// And is true if all of two or more nodes are true. Nodes after a false one are not evaluated.
type And struct {
	at
	X []Node
}

// Or is true if any of two or more nodes is true. Nodes after a true one are not evaluated.
type Or struct {
	at
	X []Node
}

// Xor is true if an odd number of two or more nodes are true. All are evaluated.
type Xor struct {
	at
	X []Node
}

// Not is true if X is false.
type Not struct {
	at
	X Node
}

// Present is true if the packet has a field. A one-bit field must also be set.
type Present struct {
	at
	X Operand
}

// Compare is a comparison with a value.
type Compare struct {
	at
	X  Operand
	Op Op
	V  Value
}

// In is true if a field equals a member of a set or list.
type In struct {
	at
	X    Operand
	Set  []Value
	List string // list name without its $; "" if Set is used
}

// Test is true if any bit of the operand's mask is set.
type Test struct {
	at
	X Operand
}

// Contains is true if the first [Window] bytes include V.
type Contains struct {
	at
	X Operand
	V []byte
}

// Matches is true if the pattern matches somewhere in the first [Window] bytes.
type Matches struct {
	at
	X       Operand
	Pattern *Pattern
}

// Rate is true if a key has more than Limit packets in Per nanoseconds. With Not set, it is
// negated.
type Rate struct {
	at
	Keys  []Operand
	Limit uint64
	Per   uint64
	Not   bool
	Index int // among the rates of its expression, from 0 in text order
}

// Op is a comparison operator.
type Op uint8

// The comparisons.
const (
	Eq Op = iota
	Ne
	Lt
	Le
	Gt
	Ge
)

var opNames = [...]string{"==", "!=", "<", "<=", ">", ">="}

func (o Op) String() string { return opNames[o] }

var opWords = map[string]Op{"==": Eq, "eq": Eq, "!=": Ne, "ne": Ne, "<": Lt, "lt": Lt, "<=": Le, "le": Le, ">": Gt, "gt": Gt, ">=": Ge, "ge": Ge}

// Part is the part of a field used as an operand.
type Part uint8

// The parts.
const (
	Whole  Part = iota // the field's value
	Slice              // field[From:To]
	Byte               // field[From], a number
	Length             // len(field), a number
)

// Operand is a field or a part of it, with an optional mask.
type Operand struct {
	Field    *Field
	Part     Part
	From, To int    // of a slice; negative: from the end
	Open     bool   // the slice extends to the end
	Mask     uint64 // significant bits, 0: all
	pos      Pos
}

// Pos returns the operand's position in the source.
func (o Operand) Pos() Pos { return o.pos }

// Type returns the type of the operand's value.
func (o Operand) Type() Type {
	if o.Part == Byte || o.Part == Length {
		return Uint
	}
	return o.Field.Type
}

// Bits returns the number of bits of a numeric operand.
func (o Operand) Bits() int {
	switch o.Part {
	case Byte:
		return 8
	case Length:
		return 17
	}
	return o.Field.Bits
}

// Value is the value of a comparison: numbers from Lo to Hi, the addresses of a prefix, addresses
// from From to To, or bytes.
type Value struct {
	Lo, Hi   uint64
	Prefix   netip.Prefix // invalid if From and To are set
	From, To netip.Addr
	Bytes    []byte
}

// isRange reports whether the value is more than one number or address.
func (v Value) isRange() bool {
	return v.Lo != v.Hi || v.From.IsValid() || v.Prefix.IsValid() && !v.Prefix.IsSingleIP()
}

// Walk calls f for every node of the tree, parents first, in text order.
func Walk(n Node, f func(Node)) {
	f(n)
	switch n := n.(type) {
	case *And:
		walkAll(n.X, f)
	case *Or:
		walkAll(n.X, f)
	case *Xor:
		walkAll(n.X, f)
	case *Not:
		Walk(n.X, f)
	}
}

func walkAll(l []Node, f func(Node)) {
	for _, n := range l {
		Walk(n, f)
	}
}

// Operands returns the operands of a node itself, without its children.
func Operands(n Node) []Operand {
	switch n := n.(type) {
	case *Present:
		return []Operand{n.X}
	case *Compare:
		return []Operand{n.X}
	case *In:
		return []Operand{n.X}
	case *Test:
		return []Operand{n.X}
	case *Contains:
		return []Operand{n.X}
	case *Matches:
		return []Operand{n.X}
	case *Rate:
		return n.Keys
	}
	return nil
}
