// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"github.com/cilium/ebpf/asm"

	"github.com/weir-project/weir/feature/filter/compile/code"
	"github.com/weir-project/weir/feature/filter/expr"
)

// Terms joined by and are tested together, because the verifier follows both ways of each branch, at the cost of ten
// instructions. The fields of all terms are checked for presence at once. The first term excludes most packets. The
// other numeric terms become one sum, equal to 0 if all of them are true.

// and generates terms joined by and.
func (g *gen) and(n *expr.And, t, f code.Label) {
	known := g.known
	defer func() { g.known = known }()
	if len(n.X) == 0 {
		g.GoTo(t)
		return
	}
	terms := n.X
	if !rated(n) {
		terms = g.all(n.X, f)
	}
	for i, x := range terms {
		next := t
		if i < len(terms)-1 {
			next = g.Label()
		}
		if s, ok := x.(*sum); ok {
			g.sum(s, next, f)
		} else {
			g.node(x, next, f)
			g.known |= implied(x)
		}
		if next != t {
			g.Bind(next)
		}
	}
	if len(terms) == 0 {
		g.GoTo(t)
	}
}

// rated reports whether a node has a rate: the terms before a rate determine its counted packets.
func rated(n expr.Node) (is bool) {
	expr.Walk(n, func(n expr.Node) {
		if _, ok := n.(*expr.Rate); ok {
			is = true
		}
	})
	return is
}

// all checks the presence of the terms' fields. It returns the terms in test order: the first numeric one, a sum of
// the other numeric ones, then the rest.
func (g *gen) all(terms []expr.Node, f code.Label) []expr.Node {
	var bits uint32
	for _, x := range terms {
		bits |= implied(x)
	}
	if g.Noted {
		g.Note = expr.Print(terms[0])
	}
	known := g.known
	lacks := bits &^ known
	g.known |= bits
	var out, rest []expr.Node
	var added []addend
	clear := presume(terms)
	for _, x := range terms {
		m, x := g.masked(x, &clear)
		if m != nil {
			added = append(added, *m)
		}
		if x == nil {
			continue
		}
		switch a := g.addend(x); {
		case a == nil:
			rest = append(rest, x)
		case !a.true:
			added = append(added, *a)
		}
	}
	word := int16(imgAbsent)
	if asked := clear[0] &^ known; asked != 0 {
		lacks, word = lacks|asked, imgMaybe
	}
	switch {
	case lacks == 0:
	case g.behind(lacks, f) != 0 || len(added) == 0:
		if behind := g.behind(lacks, f); behind != 0 {
			f = behind
		}
		g.Op(asm.LoadMem(asm.R0, asm.R8, word, asm.Word))
		g.Jump(asm.JSet.Imm(asm.R0, int32(lacks), ""), f)
	default:
		out = append(out, &sum{parts: []addend{{lacks: lacks, word: word}, added[0]}})
		added = added[1:]
	}
	if len(out) == 0 && len(added) > 0 {
		out = append(out, alone(added[:1]))
		added = added[1:]
	}
	if len(added) > 0 {
		out = append(out, alone(added))
	}
	return append(out, rest...)
}

// alone returns a sum, or its only term if one branch tests it.
func alone(parts []addend) expr.Node {
	if len(parts) == 1 && parts[0].mask == 0 && parts[0].branches() == 1 {
		return parts[0].term
	}
	return &sum{parts: parts}
}

// sum is a list of terms, each adding a nonzero value if false.
type sum struct {
	expr.Node
	parts []addend
}

// addend is a term of a sum: a number inside one of the spans or, with not, outside all of them.
type addend struct {
	term  expr.Node
	x     expr.Operand
	spans []span
	not   bool
	true  bool   // for any value
	lacks uint32 // or a check for clear absence bits,
	word  int16  // in imgAbsent or imgMaybe
	mask  uint32 // or parts relevant only if this absence bit is set
	parts []addend
}

// maxAdded is the maximum number of spans of a term in a sum.
const maxAdded = 3

// addend returns nil for terms unsuited to a sum, and for fields of unknown presence.
func (g *gen) addend(term expr.Node) *addend {
	a, n := &addend{term: term}, term
	for not, ok := n.(*expr.Not); ok; not, ok = n.(*expr.Not) {
		n, a.not = not.X, !a.not
	}
	xs := expr.Operands(n)
	if len(xs) != 1 {
		return nil
	}
	var op expr.Op
	var vs []expr.Value
	switch n := n.(type) {
	case *expr.Present:
		if n.X.Part != expr.Whole || len(n.X.Field.Of) > 0 || n.X.Field.Type != expr.Bool && n.X.Field.Type != expr.Proto {
			return nil
		}
		a.true = n.X.Field.Type == expr.Proto
		flag := uint64(1)
		if a.not {
			flag, a.not = 0, a.true
		}
		vs = []expr.Value{{Lo: flag, Hi: flag}}
	case *expr.Test:
		if len(n.X.Field.Of) > 0 { // one nonzero field is a different condition from all fields nonzero
			return nil
		}
		vs, a.not = []expr.Value{{}}, !a.not
	case *expr.Compare:
		op, vs = n.Op, []expr.Value{n.V}
	case *expr.In:
		vs = n.Set
	}
	if op == expr.Ne {
		op, a.not = expr.Eq, !a.not
	}
	a.x = ofFamily(xs[0], vs)
	absent := absentBits(a.x.Field)
	if a.x.Part == expr.Byte || a.x.Part == expr.Slice || absent == 0 || absent&^g.known != 0 || a.true && a.not {
		return nil
	}
	switch a.x.Type() {
	case expr.IPv4:
		vs = numbers4(vs)
		a.spans = spans(op, vs, 32)
	case expr.Uint, expr.Bool:
		a.spans = spans(op, vs, a.x.Bits())
	}
	if !a.true && (len(a.spans) == 0 || len(a.spans) > maxAdded) {
		return nil
	}
	return a
}

// ofFamily narrows an operand with several addresses to the only one comparable with the values.
func ofFamily(x expr.Operand, vs []expr.Value) expr.Operand {
	if x.Field.Type != expr.IP || x.Part != expr.Whole || len(vs) == 0 {
		return x
	}
	for _, v := range vs {
		if from, _ := ends(v); !from.Is4() {
			return x
		}
	}
	var only []expr.ID
	for _, id := range x.Field.Each() {
		if expr.Lookup(id).Type == expr.IPv4 {
			only = append(only, id)
		}
	}
	if len(only) == 1 {
		x.Field = expr.Lookup(only[0])
	}
	return x
}

// branches returns the number of branches needed to test the term alone.
func (a *addend) branches() int { return len(a.spans) * len(a.x.Field.Each()) }

// absentBits returns the absence bits of a field. For a field of several, they must share the bits.
func absentBits(f *expr.Field) uint32 {
	bits := ^uint32(0)
	for _, id := range f.Each() {
		if b := locations[id].absent; bits == ^uint32(0) || b == bits {
			bits = b
		} else {
			return 0
		}
	}
	return bits
}

// sum jumps to f unless all terms are true. Each false term sets bits in R4.
func (g *gen) sum(s *sum, t, f code.Label) {
	for i := 0; i < len(s.parts); i++ {
		a := &s.parts[i]
		if g.Noted && a.term != nil {
			g.Note = expr.Print(a.term)
		}
		to := asm.R5
		if i == 0 {
			to = asm.R4
		}
		g.outside(a, to)
		if i > 0 {
			g.Op(asm.Or.Reg(asm.R4, to))
		}
	}
	g.Jump(asm.JNE.Imm(asm.R4, 0, ""), f)
	g.GoTo(t)
}

// outside sets a register to 0 if and only if the term is true. It uses R0 to R3.
func (g *gen) outside(a *addend, r asm.Register) {
	if a.mask != 0 {
		g.outsideMasked(a, r)
		return
	}
	if a.lacks != 0 {
		g.Op(asm.LoadMem(r, asm.R8, a.word, asm.Word), asm.And.Imm(r, int32(a.lacks)))
		return
	}
	if g.asItStands(a, r) {
		return
	}
	bits := a.x.Bits()
	if a.x.Field.Type == expr.IPv4 || a.x.Field.Type == expr.IP {
		bits = 32
	}
	for i, id := range a.x.Field.Each() {
		g.loadNumber(a.x, id)
		for j, s := range a.spans {
			to := asm.R3
			if i+j == 0 {
				to = r
			}
			g.beyond(s, to, bits, j == len(a.spans)-1)
			if to != r {
				g.Op(asm.And.Reg(r, to))
			}
		}
	}
	g.Op(asm.RSh.Imm(r, 63))
	if a.not {
		g.Op(asm.Xor.Imm(r, 1))
	}
}

// beyond makes a register negative if R0 is outside a span. The sign of the 64-bit difference of two numbers of at
// most 32 bits tells the larger one. R0 is clobbered if last is set.
func (g *gen) beyond(s span, to asm.Register, bits int, last bool) {
	if s.hi == uint64(1)<<bits-1 && s.lo < 1<<31 {
		g.Op(asm.Mov.Reg(to, asm.R0), asm.Sub.Imm(to, int32(s.lo)))
		return
	}
	from := asm.R0
	if s.lo != 0 {
		if !last {
			from = asm.R2
			g.Op(asm.Mov.Reg(from, asm.R0))
		}
		g.Op(asm.Sub.Imm32(from, int32(s.lo)))
	}
	g.Op(asm.Mov.Imm32(to, int32(s.hi-s.lo)), asm.Sub.Reg(to, from))
}

// loadNumber loads the operand's number to R0, for one of its fields.
func (g *gen) loadNumber(x expr.Operand, id expr.ID) {
	if x.Part == expr.Length {
		g.payloadLength()
	} else {
		g.value(locations[id], expr.Operand{Field: expr.Lookup(id)})
	}
	if x.Mask != 0 {
		g.Op(asm.And.Imm32(asm.R0, int32(x.Mask)))
	}
}

// asItStands is outside for numbers compared in memory byte order. It returns false for others.
func (g *gen) asItStands(a *addend, r asm.Register) bool {
	mask, want, full, ok := a.stands()
	if !ok {
		return false
	}
	p := locations[a.x.Field.ID]
	g.Op(asm.LoadMem(r, asm.R8, p.off, p.size))
	if !full {
		g.Op(asm.And.Imm32(r, int32(mask)))
	}
	if want != 0 {
		g.Op(asm.Xor.Imm32(r, int32(want)))
	}
	if a.not { // 1 for 0, and 0 for all other values
		g.Op(asm.Sub.Imm(r, 1), asm.RSh.Imm(r, 63))
	}
	return true
}

// stands returns the mask and value for a comparison in memory byte order, if possible.
func (a *addend) stands() (mask, want uint32, full, ok bool) {
	p, v := locations[a.x.Field.ID], a.spans[0]
	if len(a.spans) != 1 || len(a.x.Field.Of) > 0 || a.x.Part != expr.Whole || a.x.Field.ID == expr.TCPLen {
		return 0, 0, false, false
	}
	if a.x.Field.Type == expr.IPv4 {
		size := v.hi - v.lo
		if size&(size+1) != 0 || v.lo&size != 0 {
			return 0, 0, false, false
		}
		return swapped(^uint32(size), p.size), swapped(uint32(v.lo), p.size), size == 0, true
	}
	if v.lo != v.hi {
		return 0, 0, false, false
	}
	return p.stands(a.x, v.lo)
}

// implied returns the absence bits known to be clear if a term is true.
func implied(n expr.Node) uint32 {
	var vs []expr.Value
	switch n := n.(type) {
	case *expr.Compare:
		if n.Op == expr.Ne {
			return 0
		}
		vs = []expr.Value{n.V}
	case *expr.In:
		vs = n.Set
	case *expr.Rate:
		return 0
	}
	xs := expr.Operands(n)
	if len(xs) != 1 {
		return 0
	}
	switch x := ofFamily(xs[0], vs); x.Field.ID {
	case expr.SIPMethod:
		return noPayload
	default:
		return absentBits(x.Field)
	}
}

// behind returns the target for a packet lacking one of bits, or 0 if it is f.
func (g *gen) behind(bits uint32, f code.Label) code.Label {
	if f != g.fails || g.lacking == nil {
		return 0
	}
	return g.lacking(bits)
}

// there jumps to f if any of bits is set in the absence bits. It reads them from memory each time. From a register,
// the verifier would learn by each test and follow every combination through all rules.
func (g *gen) there(bits uint32, f code.Label) {
	if bits &= ^g.known; bits != 0 {
		if behind := g.behind(bits, f); behind != 0 && !g.drops {
			f = behind
		}
		g.Op(asm.LoadMem(asm.R0, asm.R8, imgAbsent, asm.Word))
		g.Jump(asm.JSet.Imm(asm.R0, int32(bits), ""), f)
	}
}
