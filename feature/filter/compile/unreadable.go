// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"fmt"

	"github.com/cilium/ebpf/asm"

	"github.com/weir-project/weir/feature/filter/compile/code"
	"github.com/weir-project/weir/feature/filter/expr"
)

// Packets with an unreadable transport header leave the dissection for a separate copy of the rules. There, terms
// about unknown bytes are constants or check at run time whether the bytes are known. Other packets never execute the
// copy.

// Kinds of these packets. expr.HaveLink is a third kind, with an unreadable IP header.
const (
	ofTransport = 0
	partTCP     = 8 // known bytes of a TCP header, at least
)

// copyKinds returns the kinds with a copy of the rules.
func (g *gen) copyKinds() (haves []int) {
	if g.o.Start == Ethernet && g.need&^anyLink != 0 {
		haves = append(haves, expr.HaveLink)
	}
	if g.need&(anyL4|anyExtension) != 0 {
		haves = append(haves, ofTransport)
	}
	return haves
}

// anyExtension has the absence bits of extension headers.
const anyExtension = noHopOpts | noDstOpts | noRouting | noFrag

// variant is the rules for one kind.
type variant struct {
	have  int
	enter code.Label // label of the copy; R7 has the absence bits
	rules []Rule
	plan  *plan
	same  bool // no rule differs: these packets use the common code
}

// Nodes of constant value.
var (
	always = &expr.And{}
	never  = &expr.Or{}
)

// Unreadable returns the rule's treatment of fields of an unreadable header.
func (r Rule) Unreadable() expr.Unreadable {
	return [...]expr.Unreadable{Pass: expr.TreatNoMatch, Drop: expr.TreatMatch, Count: expr.TreatAbsent}[r.Action]
}

// newVariants returns the rules for all kinds. merged means a common version of the rules for transport headers.
func newVariants(haves []int, rules []Rule, o *Options, merged bool) []*variant {
	var out []*variant
	for i, have := range haves {
		v := &variant{have: have, same: true}
		out = append(out, v)
		if merged && have == ofTransport {
			continue
		}
		v.rules = make([]Rule, len(rules))
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
	}
	return out
}

// blank is true if the whole transport header is unknown, even its protocol.
var blank = &expr.Present{X: expr.Operand{Field: &expr.Field{ID: blankID, Name: "transport.blank", Type: expr.Proto}}}

const blankID = 255

func init() { locations[blankID] = location{absent: noBlank} }

// folder replaces terms of constant value: terms about absent fields and, unless the rule counts, about unknown ones.
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
		k = expr.KnowledgeFrom(n, f.have)
	}
	switch {
	case k == expr.Unknown:
		return f.guess(n, want)
	case k == expr.UnknownX:
		six := expr.Node(&expr.And{X: []expr.Node{blank, &expr.Present{X: expr.Operand{Field: expr.Lookup(expr.IP6)}}}})
		return unless(six, n, want)
	case f.absent(n):
		return f.lacking(n)
	}
	return n
}

// lacking returns the value of a term about an absent field.
func (f folder) lacking(n expr.Node) expr.Node {
	c, ok := n.(*expr.Compare)
	return constant(ok && c.Op == expr.Ne)
}

// unless returns a node equal to want if its bytes are unknown.
func unless(unknown, n expr.Node, want bool) expr.Node {
	if want {
		return &expr.Or{X: []expr.Node{unknown, n}}
	}
	return &expr.And{X: []expr.Node{&expr.Not{X: unknown}, n}}
}

// True if the first 16, or the first 20, bytes of a TCP header are unknown.
var (
	flagless = &expr.Not{X: &expr.Present{X: expr.Operand{Field: expr.Lookup(expr.TCPFlags)}}}
	tcpless  = &expr.Not{X: &expr.Present{X: expr.Operand{Field: expr.Lookup(expr.TCP)}}}
)

// bytesBehind returns the absence bits known to be clear if one of these nodes is false. Without blank, part of a TCP
// header is known.
func bytesBehind(n expr.Node) uint32 {
	switch n {
	case blank:
		return noPorts
	case flagless:
		return noPorts | noFlags
	case tcpless:
		return noPorts | noFlags | noTCP
	}
	return 0
}

// guess replaces a node about unknown bytes by want. If the bytes are known at run time, the node decides.
func (f folder) guess(n expr.Node, want bool) expr.Node {
	switch {
	case f.have == expr.HaveLink, expr.AnyUnknown(n, 20):
		return constant(want)
	case expr.AnyUnknown(n, 16):
		return unless(tcpless, n, want)
	case expr.AnyUnknown(n, partTCP):
		return unless(flagless, n, want)
	}
	if _, xor := n.(*expr.Xor); !xor && f.absent(n) {
		n = f.lacking(n)
	}
	switch {
	case n == constant(want):
		return n
	case n == always, n == never:
		if want {
			return blank
		}
		return &expr.Not{X: blank}
	}
	return unless(blank, n, want)
}

// absent reports whether a term uses a field absent in every packet of this kind.
func (f folder) absent(n expr.Node) bool {
	_, rate := n.(*expr.Rate)
	for _, x := range expr.Operands(n) {
		all := true
		for _, id := range x.Field.Each() {
			all = all && locations[id].absent&f.lacks() != 0
		}
		if all && locations[x.Field.Each()[0]].absent != 0 || x.Field.ID == expr.SIPMethod {
			return true
		} else if !rate {
			return false
		}
	}
	return false
}

// lacks returns the absence bits set in every packet of this kind.
func (f folder) lacks() uint32 {
	bits := noUDP | noICMP | noICMP6 | noGRE | noGREKey | noPayload | noQuestion | noQType | noMSS | noWScale | noSackPerm | noTimestamps
	if f.have == expr.HaveLink {
		bits |= noIP4 | anyIP6 | noTCP | noFlags | noPorts
	}
	return bits
}

// foldAll folds the terms of an and, or of an or. unit is its neutral element and zero its absorbing one. Rates
// before a zero still count.
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
	if zero == never && !rates {
		out = together(out)
	}
	switch len(out) {
	case 0:
		return unit
	case 1:
		return out[0]
	}
	return join(out)
}

// together groups terms of an and true for the same unknown bytes, so the bytes are checked once.
func together(terms []expr.Node) (out []expr.Node) {
	at := map[expr.Node]int{}
	for _, x := range terms {
		if x == blank {
			if i, ok := at[blank]; ok {
				out[i] = blank
			} else {
				at[blank] = len(out)
				out = append(out, blank)
			}
			continue
		}
		or, ok := x.(*expr.Or)
		if !ok || len(or.X) != 2 || or.X[0] != blank && or.X[0] != flagless && or.X[0] != tcpless {
			out = append(out, x)
			continue
		}
		i, ok := at[or.X[0]]
		switch {
		case !ok:
			at[or.X[0]] = len(out)
			out = append(out, &expr.Or{X: []expr.Node{or.X[0], &expr.And{X: []expr.Node{or.X[1]}}}})
		case out[i] != blank:
			and := out[i].(*expr.Or).X[1].(*expr.And)
			and.X = append(and.X, or.X[1])
		}
	}
	return out
}

// entry returns the label for packets with have known bytes of the header.
func (g *gen) entry(have int) code.Label {
	for _, v := range g.variants {
		switch {
		case v.have != min(have, ofTransport):
		case have == 0:
			return g.hidden
		default:
			return v.enter
		}
	}
	return g.done
}

// unreadables generates the copies of the rules. Readable packets skip them. So do unreadable packets if no rule
// differs.
func (g *gen) unreadables() {
	if len(g.variants) == 0 {
		return
	}
	all := g.Label()
	g.GoTo(all)
	counted := g.Label()
	for _, v := range g.variants {
		if v.have == expr.HaveLink {
			g.Bind(v.enter)
			g.found(noIP)
			g.storeMaybe(0) // unknown fields count as absent
			g.GoTo(counted)
			continue
		}
		g.Bind(g.hidden)
		g.found(noBlank | noShort16 | noShort20)
		if g.merged != nil {
			g.storeMaybe(anyL4 | anyExtension | noMSS | noWScale | noSackPerm | noTimestamps | noGREKey | noQuestion | noQType)
			g.GoTo(counted)
		}
		g.Bind(v.enter)
		g.storeMaybe(noUnreadable | noTCP | noPorts | noFlags | noPayload | noMSS | noWScale | noSackPerm | noTimestamps)
	}
	g.Bind(counted)
	g.Note = "the header is unreadable"
	g.found(noUnreadable)
	g.Op(asm.StoreMem(asm.R8, imgAbsent, asm.R7, asm.Word))
	g.countRare(int32(len(g.p.rules) + 1))
	g.copies = true
	for i, v := range g.variants {
		next := g.Label()
		if i < len(g.variants)-1 {
			g.Op(asm.LoadMem(asm.R0, asm.R8, imgAbsent, asm.Word))
			g.Jump(asm.JSet.Imm(asm.R0, int32(noIP), ""), next)
		}
		if v.same {
			g.GoTo(all)
		} else {
			rules, plan, required, pending := g.p.rules, g.p.plan, g.p.required, g.pending
			g.p.rules, g.p.plan, g.p.required, g.pending = v.rules, v.plan, requiredBits(v.rules), 0
			g.decide(g.shares(plan, v.plan))
			g.p.rules, g.p.plan, g.p.required, g.pending = rules, plan, required, pending
		}
		g.Bind(next)
	}
	g.copies = false
	g.Bind(all)
}

// maxShared is the maximum number of rules for a copy sharing the code after the decision. Up to this number, the
// jump to it is short enough.
const maxShared = 64

// shares reports whether a copy of the rules shares the code after the decision.
func (g *gen) shares(plan, of *plan) bool {
	return len(g.p.rules) <= maxShared && len(plan.groups) == 0 && len(of.groups) == 0
}

func requiredBits(rules []Rule) []uint32 {
	out := make([]uint32, len(rules))
	for i, r := range rules {
		out[i] = required(r)
	}
	return out
}
