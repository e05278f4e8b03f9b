// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/weir-project/weir/feature/filter/compile/code"
	"github.com/weir-project/weir/feature/filter/expr"
)

// gen generates one function. Between terms of a rule, R6 is the context and R8 the image. In the main function, R9
// is the decision of the groups.
type gen struct {
	code.Builder
	o       *Options
	p       *Program
	need    uint32
	known   uint32     // absence bits known to be clear here
	done    code.Label // end of the dissection
	xors    int        // depth of enclosing xor nodes
	rule    *expr.Expr
	fails   code.Label                   // target if the rule does not match
	lacking func(bits uint32) code.Label // target if the rule fails for lack of one of bits, 0: none
	pending int                          // branches, see maxPending
	err     error
	// scratchOff is the offset of the scratch area from the frame pointer.
	scratchOff int16
	variants   []*variant // of rules, for unreadable headers
	copies     bool       // the generated code is a copy of rules
	hidden     code.Label // target if nothing of the transport header is known
	decided    code.Label // target with the decision in R9
	merged     []Rule     // rules for readable and unreadable transport headers, nil: unreadable ones have a copy
	drops      bool       // the rule is in merged and drops
}

// fail keeps the first error.
func (g *gen) fail(err error) {
	if g.err == nil {
		g.err = err
	}
}

// xorWord is the location of parities, one bit for each nesting level of xor.
const (
	xorWord = stackSaved + 4
	maxXor  = 31
)

// node generates code that jumps to t if n is true and to f otherwise.
func (g *gen) node(n expr.Node, t, f code.Label) {
	switch n := n.(type) {
	case *expr.And:
		g.and(n, t, f)
	case *expr.Or:
		known := g.known
		for i, x := range n.X {
			if i == len(n.X)-1 {
				g.node(x, t, f)
				break
			}
			next := g.Label()
			g.node(x, t, next)
			g.Bind(next)
			g.known |= bytesBehind(x)
		}
		if g.known = known; len(n.X) == 0 {
			g.GoTo(f)
		}
	case *expr.Xor:
		g.xor(n, t, f)
	case *expr.Not:
		g.node(n.X, f, t)
	case *presumed:
		g.presumed(n, t, f)
	default:
		if g.Noted {
			g.Note = expr.Print(n)
		}
		g.term(n, t, f)
	}
}

// xor keeps the parity in memory. Duplicating the code for both parities would grow exponentially.
func (g *gen) xor(n *expr.Xor, t, f code.Label) {
	if g.xors == maxXor {
		g.fail(fmt.Errorf("%w: more than %d xor within each other", ErrTooLarge, maxXor))
		return
	}
	bit := int32(1) << g.xors
	g.xors++
	defer func() { g.xors-- }()
	g.Op(asm.LoadMem(asm.R0, asm.RFP, xorWord, asm.Word), asm.And.Imm(asm.R0, ^bit), asm.StoreMem(asm.RFP, xorWord, asm.R0, asm.Word))
	for _, x := range n.X {
		odd, even := g.Label(), g.Label()
		g.node(x, odd, even)
		g.Bind(odd)
		g.Op(asm.LoadMem(asm.R0, asm.RFP, xorWord, asm.Word), asm.Xor.Imm(asm.R0, bit), asm.StoreMem(asm.RFP, xorWord, asm.R0, asm.Word))
		g.Bind(even)
	}
	g.Op(asm.LoadMem(asm.R0, asm.RFP, xorWord, asm.Word))
	g.Jump(asm.JSet.Imm(asm.R0, bit, ""), t)
	g.GoTo(f)
}

func (g *gen) term(n expr.Node, t, f code.Label) {
	switch n := n.(type) {
	case *expr.Present:
		g.present(n.X, t, f)
	case *expr.Test:
		g.numbers(n.X, t, f, func(t, f code.Label) {
			g.Jump(asm.JSet.Imm(asm.R0, int32(n.X.Mask), ""), t)
			g.GoTo(f)
		})
	case *expr.Compare:
		if n.Op == expr.Ne { // the negation of ==, also if the field is absent
			g.compare(n.X, expr.Eq, []expr.Value{n.V}, f, t)
			return
		}
		g.compare(n.X, n.Op, []expr.Value{n.V}, t, f)
	case *expr.In:
		if n.List != "" {
			g.list(n, t, f)
			return
		}
		g.compare(n.X, expr.Eq, n.Set, t, f)
	case *expr.Contains:
		g.contains(n, t, f)
	case *expr.Matches:
		g.matches(n, t, f)
	case *expr.Rate:
		g.rate(n, t, f)
	default:
		g.fail(fmt.Errorf("compile: no such node: %T", n))
	}
}

// each generates code for every single-valued field of x, until one matches.
func (g *gen) each(x expr.Operand, t, f code.Label, one func(p location, id expr.ID, t, f code.Label)) {
	ids := x.Field.Each()
	for i, id := range ids {
		next := f
		if i < len(ids)-1 {
			next = g.Label()
		}
		p := locations[id]
		g.there(p.absent, next)
		one(p, id, t, next)
		if next != f {
			g.Bind(next)
		}
	}
}

func (g *gen) present(x expr.Operand, t, f code.Label) {
	switch {
	case x.Part == expr.Byte:
		g.numbers(x, t, f, func(t, _ code.Label) { g.GoTo(t) })
	case x.Part == expr.Slice:
		g.slice(x, -1, f)
		g.GoTo(t)
	case x.Part == expr.Whole && x.Field.Type == expr.Bool:
		g.numbers(x, t, f, func(t, f code.Label) {
			g.Jump(asm.JNE.Imm(asm.R0, 0, ""), t)
			g.GoTo(f)
		})
	case x.Field.ID == expr.SIPMethod:
		g.anyMethod(t, f)
	default:
		g.each(x, t, f, func(_ location, _ expr.ID, t, _ code.Label) { g.GoTo(t) })
	}
}

// compare generates an equality with any of the values, or an ordering with the only one.
func (g *gen) compare(x expr.Operand, op expr.Op, vs []expr.Value, t, f code.Label) {
	switch x.Type() {
	case expr.Bytes, expr.Name:
		for i, v := range vs {
			next := f
			if i < len(vs)-1 {
				next = g.Label()
			}
			g.text(x, v, t, next)
			if next != f {
				g.Bind(next)
			}
		}
	case expr.IPv4, expr.IPv6, expr.IP:
		g.addresses(x, op, vs, t, f)
	case expr.MAC:
		g.each(x, t, f, func(p location, _ expr.ID, t, f code.Label) { g.macs(p, vs, t, f) })
	default:
		g.integers(x, op, vs, t, f)
	}
}

// span is the interval from lo to hi, inclusive.
type span struct{ lo, hi uint64 }

// spans converts a comparison to intervals of numbers below 2^bits.
func spans(op expr.Op, vs []expr.Value, bits int) []span {
	most := uint64(1)<<bits - 1
	var out []span
	for _, v := range vs {
		s := span{v.Lo, v.Hi}
		switch op {
		case expr.Lt:
			if v.Lo == 0 {
				continue
			}
			s = span{0, v.Lo - 1}
		case expr.Le:
			s = span{0, v.Lo}
		case expr.Gt:
			if v.Lo == most {
				continue
			}
			s = span{v.Lo + 1, most}
		case expr.Ge:
			s = span{v.Lo, most}
		}
		out = append(out, s)
	}
	return merge(out)
}

func (g *gen) integers(x expr.Operand, op expr.Op, vs []expr.Value, t, f code.Label) {
	ss := spans(op, vs, x.Bits())
	if len(ss) == 1 && ss[0].lo == ss[0].hi && x.Part == expr.Whole && x.Field.ID != expr.TCPLen { // tcp.len is computed, not in memory
		g.each(x, t, f, func(p location, _ expr.ID, t, f code.Label) { g.equal(p, x, ss[0].lo, t, f) })
		return
	}
	g.numbers(x, t, f, func(t, f code.Label) { g.search(ss, x.Bits(), t, f) })
}

// equal compares a number in memory byte order, if possible.
func (g *gen) equal(p location, x expr.Operand, v uint64, t, f code.Label) {
	mask, want, full, ok := p.stands(x, v)
	if !ok {
		g.GoTo(f)
		return
	}
	g.Op(asm.LoadMem(asm.R0, asm.R8, p.off, p.size))
	if !full {
		g.Op(asm.And.Imm32(asm.R0, int32(mask)))
	}
	g.Jump(asm.JEq.Imm32(asm.R0, int32(want), ""), t)
	g.GoTo(f)
}

// stands returns the mask and value of a number in memory byte order. full reports a mask of all bits. ok is false if
// no packet can have the value.
func (p location) stands(x expr.Operand, v uint64) (mask, want uint32, full, ok bool) {
	all := uint32(1)<<(8*p.size.Sizeof()) - 1
	m := uint64(all)
	if p.mask != 0 {
		m = uint64(p.mask) << p.shift
	} else if p.shift != 0 {
		m = m >> p.shift << p.shift
	}
	if x.Mask != 0 {
		m &= x.Mask >> p.times << p.shift
	}
	w := v >> p.times << p.shift
	ok = w>>p.shift<<p.times == v && w&^m == 0
	return swapped(uint32(m), p.size), swapped(uint32(w), p.size), m == uint64(all), ok
}

// numbers loads each value of the operand to R0 and generates test for it.
func (g *gen) numbers(x expr.Operand, t, f code.Label, test func(t, f code.Label)) {
	masked := func(t, f code.Label) {
		if x.Mask != 0 {
			g.Op(asm.And.Imm32(asm.R0, int32(x.Mask)))
		}
		test(t, f)
	}
	switch x.Part {
	case expr.Byte:
		g.payloadByte(x, f)
		masked(t, f)
	case expr.Length:
		g.there(noPayload, f)
		g.payloadLength()
		masked(t, f)
	default:
		g.each(x, t, f, func(p location, _ expr.ID, t, f code.Label) {
			g.value(p, x)
			masked(t, f)
		})
	}
}

// value loads a number to R0.
func (g *gen) value(p location, x expr.Operand) {
	if x.Field.ID == expr.TCPLen {
		g.payloadLength()
		return
	}
	g.Op(asm.LoadMem(asm.R0, asm.R8, p.off, p.size))
	if p.size != asm.Byte {
		g.Op(asm.HostTo(asm.BE, asm.R0, p.size))
	}
	if p.shift != 0 {
		g.Op(asm.RSh.Imm(asm.R0, int32(p.shift)))
	}
	if p.mask != 0 {
		g.Op(asm.And.Imm(asm.R0, int32(p.mask)))
	}
	if p.times != 0 {
		g.Op(asm.LSh.Imm(asm.R0, int32(p.times)))
	}
}

func (g *gen) payloadLength() {
	g.Op(asm.LoadMem(asm.R0, asm.R8, imgEnd, asm.Word), asm.LoadMem(asm.R1, asm.R8, imgBody, asm.Word), asm.Sub.Reg(asm.R0, asm.R1))
}

// macs compares 48 bits: 4 bytes, then 2.
func (g *gen) macs(p location, vs []expr.Value, t, f code.Label) {
	for _, v := range vs {
		next := g.Label()
		// Stack reads must be aligned: the source address begins in the middle of a word.
		wordAt, halfAt, w, h := p.off, p.off+4, uint32(v.Lo>>16), uint32(v.Lo&0xffff)
		if p.off%4 != 0 {
			wordAt, halfAt, w, h = p.off+2, p.off, uint32(v.Lo), uint32(v.Lo>>32)
		}
		g.Op(asm.LoadMem(asm.R0, asm.R8, wordAt, asm.Word))
		g.Jump(asm.JNE.Imm32(asm.R0, int32(swapped(w, asm.Word)), ""), next)
		g.Op(asm.LoadMem(asm.R0, asm.R8, halfAt, asm.Half))
		g.Jump(asm.JEq.Imm32(asm.R0, int32(swapped(h, asm.Half)), ""), t)
		g.Bind(next)
	}
	g.GoTo(f)
}

// generate generates the program.
func (p *Program) generate() error {
	p.required = requiredBits(p.rules)
	p.skips = true
	err := p.generateOnce()
	if errors.Is(err, code.ErrFar) {
		p.skips = false
		err = p.generateOnce()
	}
	return err
}

func (p *Program) generateOnce() error {
	p.Tables, p.functions, p.patterns, p.automata, p.rates = map[string]string{}, nil, 0, nil, nil
	g := &gen{o: &p.opts, p: p, need: needs(p.rules)}
	g.Noted = p.noted
	g.Ins = make([]code.Insn, 0, 1024+64*len(p.plan.steps))
	size := scratchSize(p.rules, p.plan, p.opts.Hook)
	g.merged = g.mergedRules()
	g.variants = newVariants(g.copyKinds(), p.rules, g.o, g.merged != nil)
	g.hidden = g.Label()
	for _, v := range g.variants {
		v.enter = g.Label()
		if !v.same {
			size = max(size, scratchSize(v.rules, v.plan, p.opts.Hook))
		}
	}
	g.scratchOff = stackImage - size
	p.Spec = &ebpf.CollectionSpec{Maps: map[string]*ebpf.MapSpec{}, Programs: map[string]*ebpf.ProgramSpec{}}
	p.Spec.Maps[CountsName] = &ebpf.MapSpec{Name: CountsName, Type: ebpf.PerCPUArray, KeySize: 4, ValueSize: 32, MaxEntries: uint32(len(p.rules) + 2)}
	g.dissect()
	g.decided = g.Label()
	g.unreadables()
	g.decideAll()
	if g.err != nil {
		return g.err
	}
	p.automataMap()
	ins, notes, err := g.Finish(stackImage)
	if err != nil {
		return err
	}
	p.notes = notes
	fs := called(ins, p.functions)
	if len(fs) > 0 {
		withTypes(ins)
	}
	p.dropTables(fs)
	ins = append(ins, fs...)
	spec := &ebpf.ProgramSpec{Name: ProgramName, License: code.License, Instructions: ins}
	switch p.opts.Hook {
	case Socket, XTBPF:
		spec.Type = ebpf.SocketFilter
	case Netfilter:
		spec.Type, spec.AttachType = ebpf.Netfilter, ebpf.AttachNetfilter
	case TC:
		spec.Type = ebpf.SchedCLS
	case XDP:
		spec.Type = ebpf.XDP
	}
	p.Spec.Programs[ProgramName] = spec
	return nil
}
