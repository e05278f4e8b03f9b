// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"fmt"

	"github.com/cilium/ebpf/asm"

	"github.com/weir-project/weir/feature/filter/expr"
)

// Packets whose transport header cannot be read leave the dissection for a copy of the rules of their own, in which every
// term about unknown bytes is a constant. Other packets never come there.

// havesOf are the kinds of unreadable headers: not even IP is there, nothing of the transport header is, or at least 8 bytes of
// TCP. How many is asked at run time.
func (g *gen) havesOf() (haves []int) {
	if g.o.Start == Ethernet && g.need&^anyLink != 0 {
		haves = append(haves, expr.HaveLink)
	}
	if g.need&(anyL4|anyExtension) != 0 {
		haves = append(haves, 0, partTCP)
	}
	return haves
}

const partTCP = 8

// anyExtension are the bits of extension headers.
const anyExtension = noHopOpts | noDstOpts | noRouting | noFrag

// variant is the rules as they are for one kind.
type variant struct {
	have  int
	enter label // R7 is what is absent
	rules []Rule
	plan  *plan
	same  bool // no rule differs: the code of all packets serves
}

// always and never match.
var (
	always = &expr.And{}
	never  = &expr.Or{}
)

// Unreadable says how the rule takes fields of a header that cannot be read.
func (r Rule) Unreadable() expr.Unreadable {
	return [...]expr.Unreadable{Pass: expr.TakeNoMatch, Drop: expr.TakeMatch, Count: expr.TakeAbsent}[r.Action]
}

// newVariants are the rules for all kinds.
func newVariants(haves []int, rules []Rule, o *Options) []*variant {
	var out []*variant
	for i, have := range haves {
		v := &variant{have: have, same: true, rules: make([]Rule, len(rules))}
		ended := false
		for j, r := range rules {
			v.rules[j] = r
			if ended {
				v.rules[j].Match = &expr.Expr{Root: never}
				continue
			}
			if o.AbsentUnreadable {
				continue
			}
			f := folder{have: have, unknown: r.Action != Count, want: r.Action == Drop}
			root := f.fold(r.Match.Root, f.want)
			v.same = v.same && (r.Action == Count || !expr.AnyUnknown(r.Match.Root, have))
			v.rules[j].Match, v.rules[j].of = &expr.Expr{Root: root, Source: r.Match.Source}, r.Match
			ended = root == always && r.Action != Count
		}
		if !v.same {
			v.plan = newPlan(v.rules, fmt.Sprintf("filter_u%dg", i))
		}
		out = append(out, v)
	}
	return out
}

// folder replaces terms whose value is known beforehand: about absent fields, and, unless the rule counts, about unknown ones.
type folder struct {
	have    int
	unknown bool
	want    bool
}

func constant(is bool) expr.Node {
	if is {
		return always
	}
	return never
}

func (f folder) fold(n expr.Node, want bool) expr.Node {
	switch n := n.(type) {
	case *expr.And:
		return f.foldAll(n.X, want, always, never, func(x []expr.Node) expr.Node { return &expr.And{X: x} })
	case *expr.Or:
		return f.foldAll(n.X, want, never, always, func(x []expr.Node) expr.Node { return &expr.Or{X: x} })
	case *expr.Not:
		switch x := f.fold(n.X, !want); x {
		case always:
			return never
		case never:
			return always
		default:
			return &expr.Not{X: x}
		}
	case *expr.Xor:
		if f.unknown && expr.AnyUnknown(n, f.have) {
			return f.guess(n, want)
		}
		return n
	}
	return f.term(n, want)
}

func (f folder) term(n expr.Node, want bool) expr.Node {
	k := expr.Known
	if f.unknown {
		k = expr.KnowledgeOf(n, f.have)
	}
	switch {
	case k == expr.Unknown:
		return f.guess(n, want)
	case k == expr.UnknownX:
		six := expr.Node(&expr.Present{X: expr.Operand{Field: expr.Lookup(expr.IP6)}})
		if want {
			return &expr.Or{X: []expr.Node{six, n}}
		}
		return &expr.And{X: []expr.Node{&expr.Not{X: six}, n}}
	case f.absent(n):
		c, ok := n.(*expr.Compare)
		return constant(ok && c.Op == expr.Ne)
	}
	return n
}

// guess replaces a node about unknown bytes by the wanted value. Where the bytes are there at run time, the node decides.
func (f folder) guess(n expr.Node, want bool) expr.Node {
	whole := expr.Operand{Field: expr.Lookup(expr.TCPFlags)}
	switch {
	case f.have <= 0, expr.AnyUnknown(n, 20):
		return constant(want)
	case expr.AnyUnknown(n, 16):
		whole.Field = expr.Lookup(expr.TCP)
	}
	there := &expr.Present{X: whole}
	if want {
		return &expr.Or{X: []expr.Node{&expr.Not{X: there}, n}}
	}
	return &expr.And{X: []expr.Node{there, n}}
}

// absent says whether a term asks for a field that no packet of this kind has.
func (f folder) absent(n expr.Node) bool {
	_, rate := n.(*expr.Rate)
	for _, x := range expr.Operands(n) {
		all := true
		for _, id := range x.Field.Each() {
			all = all && places[id].absent&f.lacks() != 0
		}
		if all && places[x.Field.Each()[0]].absent != 0 || x.Field.ID == expr.SIPMethod {
			return true
		} else if !rate {
			return false
		}
	}
	return false
}

// lacks are the bits that are set in every packet of this kind.
func (f folder) lacks() uint32 {
	bits := noUDP | noICMP | noICMP6 | noGRE | noGREKey | noPayload | noQuestion | noQType | noMSS | noWScale | noSackPerm | noTimestamps
	if f.have < partTCP {
		bits |= noTCP | noFlags | noPorts
	}
	if f.have == expr.HaveLink {
		bits |= noIP4 | anyIP6
	}
	return bits
}

// foldAll folds the terms of an and or an or, for which unit changes nothing and zero decides. Rates before a zero count.
func (f folder) foldAll(terms []expr.Node, want bool, unit, zero expr.Node, join func([]expr.Node) expr.Node) expr.Node {
	var out []expr.Node
	rates := false
	for _, x := range terms {
		x = f.fold(x, want)
		if x == unit {
			continue
		}
		if x == zero && !rates {
			return zero
		}
		out = append(out, x)
		if x == zero {
			break
		}
		rates = rates || rated(x)
	}
	switch len(out) {
	case 0:
		return unit
	case 1:
		return out[0]
	}
	return join(out)
}

// entry is where packets go of whose header so many bytes are there.
func (g *gen) entry(have int) label {
	for _, v := range g.variants {
		if v.have == min(have, partTCP) {
			return v.enter
		}
	}
	return g.done
}

// unreadables generates the copies of the rules for unreadable packets. Other packets skip them, and so do unreadable
// packets where no rule differs.
func (g *gen) unreadables() {
	if len(g.variants) == 0 {
		return
	}
	all := g.label()
	g.goTo(all)
	for _, v := range g.variants {
		g.bind(v.enter)
		g.note = fmt.Sprintf("a transport header of which %d bytes are there", max(0, v.have))
		g.found(noUnreadable)
		g.op(asm.StoreMem(asm.R8, imgAbsent, asm.R7, asm.Word))
		g.op(asm.Mov.Imm(asm.R1, int32(len(g.p.rules)+1)))
		g.count()
		if v.same {
			g.goTo(all)
			continue
		}
		rules, plan, required, pending := g.p.rules, g.p.plan, g.p.required, g.pending
		g.p.rules, g.p.plan, g.p.required, g.pending = v.rules, v.plan, requiredOf(v.rules), 0
		g.decide()
		g.p.rules, g.p.plan, g.p.required, g.pending = rules, plan, required, pending
	}
	g.bind(all)
}

func requiredOf(rules []Rule) []uint32 {
	out := make([]uint32, len(rules))
	for i, r := range rules {
		out[i] = required(r)
	}
	return out
}
