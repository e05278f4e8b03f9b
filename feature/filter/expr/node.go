// SPDX-License-Identifier: Apache-2.0

package expr

import "net/netip"

// Expr is a parsed expression. It never changes, and may be used by several goroutines.
type Expr struct {
	Root   Node
	Source string // as it was parsed
}

// Node is a node of the tree: one of the types below, which nobody changes once they are parsed.
type Node interface {
	Pos() Pos
	node()
}

type at struct{ pos Pos }

// Pos is where the node begins in the source.
func (a at) Pos() Pos { return a.pos }
func (at) node()      {}

// And is true if all of two or more are; what follows one that is false is not evaluated.
type And struct {
	at
	X []Node
}

// Or is true if any of two or more is; what follows one that is true is not evaluated.
type Or struct {
	at
	X []Node
}

// Xor is true if an odd number of two or more are; all are evaluated.
type Xor struct {
	at
	X []Node
}

// Not is true if X is not.
type Not struct {
	at
	X Node
}

// Present is true if the packet has a field; of a field of one bit, if it is set.
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

// In is true if a field is any of the members of a set, or of a list.
type In struct {
	at
	X    Operand
	Set  []Value
	List string // name of a list, without its $; "" if there is Set
}

// Test is true if any bit of the operand's mask is set.
type Test struct {
	at
	X Operand
}

// Contains is true if the bytes have V somewhere, in their first [Window].
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

// Rate is true if the packets of one key are more than Limit in Per nanoseconds, and with Not set if they are not.
type Rate struct {
	at
	Keys  []Operand
	Limit uint64
	Per   uint64
	Not   bool
	Index int // of the rates of its expression, from 0 in the order of the text
}

// Op is how two values are compared.
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

// Part says what of a field an operand is.
type Part uint8

// The parts.
const (
	Whole  Part = iota // the field's value
	Slice              // field[From:To]
	Byte               // field[From], a number
	Length             // len(field), a number
)

// Operand is a field, or a part of it, with the bits that count.
type Operand struct {
	Field    *Field
	Part     Part
	From, To int    // of a slice; negative ones count from the end
	Open     bool   // a slice goes on to the end
	Mask     uint64 // bits that count, 0: all
	pos      Pos
}

// Pos is where the operand begins in the source.
func (o Operand) Pos() Pos { return o.pos }

// Type is the type of the operand's value.
func (o Operand) Type() Type {
	if o.Part == Byte || o.Part == Length {
		return Uint
	}
	return o.Field.Type
}

// Bits is how many bits a number has.
func (o Operand) Bits() int {
	switch o.Part {
	case Byte:
		return 8
	case Length:
		return 17
	}
	return o.Field.Bits
}

// Value is what a field is compared with: the numbers Lo to Hi, the addresses of a prefix or From to To, or bytes.
type Value struct {
	Lo, Hi   uint64
	Prefix   netip.Prefix // not valid where From and To are
	From, To netip.Addr
	Bytes    []byte
}

// isRange says that the value is more than one number or address.
func (v Value) isRange() bool {
	return v.Lo != v.Hi || v.From.IsValid() || v.Prefix.IsValid() && !v.Prefix.IsSingleIP()
}

// Walk calls f for every node of the tree, parents first, in the order of the text.
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

// Operands are the operands of a node itself, none of its children.
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
