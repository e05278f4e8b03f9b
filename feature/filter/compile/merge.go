// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"math/bits"

	"github.com/cilium/ebpf/asm"

	"github.com/weir-project/weir/feature/filter/compile/code"
	"github.com/weir-project/weir/feature/filter/expr"
)

// Verifying the copy of the rules for unreadable headers takes a third of the time of the rules. A program with some
// rules, but not many, has no copy. A term about possibly unknown bytes then becomes an or with a check for this. In
// a sum, the check costs a mask instead of a branch.

// Range of the number of rules of a program without a copy. Below it, the copy is short, and the masks would cost
// packets time. Above it, the masks would cost too much: 0.4 ns a rule.
const (
	leastMerged = 4
	maxMerged   = 16
)

// unknown has nodes, each true if the header bytes from a certain one on are unknown.
var unknown = [...]struct {
	have int    // first unknown byte
	bit  uint32 // absence bit, clear if the bytes are unknown
	node expr.Node
}{
	{20, noUnreadable, unknownNode(251, "transport.unreadable", noUnreadable)},
	{16, noShort20, unknownNode(252, "transport.short20", noShort20)},
	{partTCP, noShort16, unknownNode(253, "transport.short16", noShort16)},
	{0, noBlank, unknownNode(254, "transport.blank", noBlank)},
}

func unknownNode(id expr.ID, name string, bit uint32) expr.Node {
	locations[id] = location{absent: bit}
	return &expr.Present{X: expr.Operand{Field: &expr.Field{ID: id, Name: name, Type: expr.Proto}}}
}

// mergedRules returns the rules common to all packets, nil if unreadable packets have a copy.
func (g *gen) mergedRules() []Rule {
	n := len(g.p.rules)
	if n < leastMerged || n > maxMerged || len(g.p.plan.groups) > 0 || g.o.AbsentUnreadable || g.need&(anyL4|anyExtension) == 0 {
		return nil
	}
	out := make([]Rule, n)
	for i, r := range g.p.rules {
		if usesR7(r.Match.Root) {
			return nil
		}
		out[i] = r
		if r.Action != Count {
			out[i].Match, out[i].of = &expr.Expr{Root: forAll(r.Match.Root, r.Action == Drop), Source: r.Match.Source}, r.Match
		}
	}
	return out
}

// decideAll generates the rules for packets without a copy. R7 is the mask of noBlank meanwhile.
func (g *gen) decideAll() {
	if g.merged == nil {
		g.decide(false)
		return
	}
	rules := g.p.rules
	g.p.rules = g.merged
	g.maskTo(asm.R7, noBlank)
	g.decide(false)
	g.p.rules = rules
}

// storeMaybe stores R7 without the bits of but in imgMaybe.
func (g *gen) storeMaybe(but uint32) {
	if g.merged != nil {
		g.Op(asm.Mov.Reg(asm.R1, asm.R7), asm.And.Imm(asm.R1, int32(^but)), asm.StoreMem(asm.R8, imgMaybe, asm.R1, asm.Word))
	}
}

// usesR7 reports whether a node's code uses R7, or has a rate: rates may count packets without matching.
func usesR7(n expr.Node) (takes bool) {
	expr.Walk(n, func(n expr.Node) {
		switch n.(type) {
		case *expr.Contains, *expr.Matches, *expr.Rate:
			takes = true
		}
	})
	return takes
}

// forAll rewrites a node to equal want if its bytes are unknown.
func forAll(n expr.Node, want bool) expr.Node {
	switch n := n.(type) {
	case *expr.And:
		return &expr.And{X: gather(eachForAll(n.X, want))}
	case *expr.Or:
		return &expr.Or{X: eachForAll(n.X, want)}
	case *expr.Not:
		return &expr.Not{X: forAll(n.X, !want)}
	}
	_, xor := n.(*expr.Xor)
	for _, u := range unknown {
		switch k := expr.KnowledgeFrom(n, u.have); {
		case xor && !expr.AnyUnknown(n, u.have), !xor && k == expr.Known:
			continue
		case !xor && k == expr.UnknownX:
			six := &expr.Present{X: expr.Operand{Field: expr.Lookup(expr.IP6)}}
			return unless(&expr.And{X: []expr.Node{u.node, six}}, n, want)
		case !want && falseIfAbsent(n):
			return n
		}
		return unless(u.node, n, want)
	}
	return n
}

func eachForAll(terms []expr.Node, want bool) []expr.Node {
	out := make([]expr.Node, len(terms))
	for i, x := range terms {
		out[i] = forAll(x, want)
	}
	return out
}

// falseIfAbsent reports whether a term is false if its field is absent. Unknown fields are absent, except fields of
// extension headers.
func falseIfAbsent(n expr.Node) bool {
	switch n := n.(type) {
	case *expr.Xor:
		return false
	case *expr.Compare:
		return n.Op != expr.Ne
	}
	return true
}

// gather joins terms of an and true for the same unknown bytes.
func gather(terms []expr.Node) (out []expr.Node) {
	at := map[expr.Node]*expr.And{}
	for _, x := range terms {
		u, inner := unlessUnknown(x)
		if u == nil {
			out = append(out, x)
			continue
		}
		if and := at[u]; and != nil {
			and.X = append(and.X, inner)
			continue
		}
		at[u] = &expr.And{X: []expr.Node{inner}}
		out = append(out, unless(u, at[u], true))
	}
	return out
}

// unlessUnknown splits a node joined by forAll, and returns nil for others.
func unlessUnknown(x expr.Node) (u, inner expr.Node) {
	if or, ok := x.(*expr.Or); ok && len(or.X) == 2 && unknownBit(or.X[0]) != 0 {
		return or.X[0], or.X[1]
	}
	return nil, nil
}

// unknownBit returns the bit of a node in unknown, else 0.
func unknownBit(n expr.Node) uint32 {
	for _, u := range unknown {
		if u.node == n {
			return u.bit
		}
	}
	return 0
}

// presumed is a term about possibly unknown bytes, after a sum with the check for its fields.
type presumed struct {
	expr.Node
	u, x  expr.Node
	known uint32 // absence bits known to be clear unless u is true
}

func (g *gen) presumed(n *presumed, t, f code.Label) {
	next, known := g.Label(), g.known
	g.node(n.u, t, next)
	g.Bind(next)
	g.known |= n.known
	g.node(n.x, t, f)
	g.known = known
}

// presume returns the absence bits known to be clear if some terms are all true, by the false node of unknown. If the
// first bytes are unknown, so are all.
func presume(terms []expr.Node) (bits [len(unknown)]uint32) {
	for _, x := range terms {
		u, inner := unlessUnknown(x)
		for i := range unknown {
			if u != nil {
				for _, t := range conjuncts(inner) {
					bits[i] |= implied(t)
				}
			}
			if unknown[i].node == u {
				break
			}
		}
	}
	return bits
}

func conjuncts(n expr.Node) []expr.Node {
	if and, ok := n.(*expr.And); ok {
		return and.X
	}
	return []expr.Node{n}
}

// masked splits x into sum terms, relevant only if their bytes are known, and the rest. Either may be nil.
func (g *gen) masked(x expr.Node, clear *[len(unknown)]uint32) (*addend, expr.Node) {
	u, inner := unlessUnknown(x)
	if u == nil {
		return nil, x
	}
	known := g.known
	defer func() { g.known = known }()
	for i := range unknown {
		if unknown[i].node == u {
			g.known |= clear[i]
		}
	}
	a := &addend{term: x, mask: unknownBit(u)}
	var rest []expr.Node
	for _, t := range conjuncts(inner) {
		switch p := g.addend(t); {
		case p == nil:
			rest = append(rest, t)
		case !p.true:
			a.parts = append(a.parts, *p)
		}
	}
	if len(a.parts) == 0 {
		a = nil
	}
	if len(rest) == 0 {
		return a, nil
	}
	return a, &presumed{Node: x, u: u, x: &expr.And{X: rest}, known: g.known}
}

// outsideMasked is outside for masked terms. It also clobbers R5, or R1 if r is R5.
func (g *gen) outsideMasked(a *addend, r asm.Register) {
	to := asm.R5
	if r == to {
		to = asm.R1
	}
	g.outside(&a.parts[0], r)
	for i := range a.parts[1:] {
		g.outside(&a.parts[1+i], to)
		g.Op(asm.Or.Reg(r, to))
	}
	if a.mask == noBlank {
		g.Op(asm.And.Reg(r, asm.R7))
		return
	}
	g.maskTo(asm.R3, a.mask)
	g.Op(asm.And.Reg(r, asm.R3))
}

// maskTo sets a register to all ones if the absence bit is set, else to 0.
func (g *gen) maskTo(r asm.Register, bit uint32) {
	g.Op(asm.LoadMem(r, asm.R8, imgAbsent, asm.Word), asm.LSh.Imm(r, int32(32+bits.LeadingZeros32(bit))), asm.ArSh.Imm(r, 63))
}
