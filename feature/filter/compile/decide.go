// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"fmt"

	"github.com/cilium/ebpf/asm"

	"github.com/weir-project/weir/feature/filter/compile/code"
	"github.com/weir-project/weir/feature/filter/expr"
)

// undecided exceeds all decisions. A decision is twice the rule's index, plus 1 if the packet is dropped.
const undecided = 1 << 30

func (p *Program) decision(rule int) int32 {
	action := p.opts.Default
	if rule < len(p.rules) {
		action = p.rules[rule].Action
	}
	d := int32(rule) << 1
	if action == Drop {
		d |= 1
	}
	return d
}

// decide generates the rules and the code after the decision, or a jump to that code.
func (g *gen) decide(elsewhere bool) {
	decided := g.Label()
	g.Op(asm.Mov.Imm(asm.R9, undecided))
	g.groups()
	relayed := len(g.Ins)
	starts := g.starts()
	for i, s := range g.p.plan.steps {
		if len(g.Ins)-relayed > code.MaxBetween {
			decided, relayed = g.Relay(decided), len(g.Ins)
		}
		g.Bind(starts[i])
		g.lacking = g.behindLacking(i, starts)
		if g.merged != nil && !g.copies {
			if g.drops = g.p.rules[s.rule].Action == Drop; !g.drops {
				g.lacking = nil // it would skip rules dropping unreadable packets
			}
		}
		if s.after {
			g.Note = "a grouped rule precedes"
			g.Jump(asm.JLT.Imm(asm.R9, int32(s.rule)<<1, ""), decided)
		}
		g.testRule(s.rule, decided)
	}
	g.Bind(starts[len(starts)-1])
	if len(g.p.plan.groups) > 0 {
		g.Jump(asm.JNE.Imm(asm.R9, undecided, ""), decided)
	}
	g.Note = "no rule decides"
	g.Op(asm.Mov.Imm(asm.R9, g.p.decision(len(g.p.rules))))
	g.Bind(decided)
	if elsewhere {
		g.GoTo(g.decided)
		return
	}
	if !g.copies {
		g.Bind(g.decided)
	}
	g.launder(asm.R9, imgSpare)
	g.groupCounts()
	g.Op(asm.Mov.Reg(asm.R1, asm.R9), asm.RSh.Imm(asm.R1, 1))
	g.Note = "counted"
	none := g.Label()
	lost := none
	if g.o.Kernel.Unwritten && !g.copies && g.need != 0 {
		lost = g.Label()
	}
	g.countOr(lost, none)
	g.verdict()
	if lost != none {
		g.Bind(lost)
		g.readImage()
		g.GoTo(none)
	}
}

// readImage reads every slot of the image read elsewhere. No packet executes it, but the verifier analyses it early.
// Since Linux 6.18 the verifier recomputes the live stack slots of the whole program whenever the end of a path
// reveals another one. Here it finds all of them at once.
func (g *gen) readImage() {
	var read [code.MaxSlots]bool
	for i := range g.Ins {
		if x := &g.Ins[i]; x.Here == 0 && x.OpCode.Class().IsLoad() && x.Src == asm.R8 {
			read[x.Offset/8] = true
		}
	}
	g.Note = "unreachable: array elements always exist"
	for slot, is := range read {
		if is {
			g.Op(asm.LoadMem(asm.R1, asm.R8, int16(8*slot), asm.DWord))
		}
	}
}

// starts returns labels for the steps and for the code after the last one.
func (g *gen) starts() []code.Label {
	out := make([]code.Label, len(g.p.plan.steps)+1)
	for i := range out {
		out[i] = g.Label()
	}
	return out
}

// behindLacking returns a function from absence bits to the next relevant step after i, or 0 for the directly
// following one. A packet lacking a layer skips all rules requiring it: a TCP segment passes a hundred UDP rules with
// one jump. If such a jump is too long, generate starts over without skipping.
func (g *gen) behindLacking(i int, starts []code.Label) func(bits uint32) code.Label {
	if len(g.p.plan.groups) > 0 || !g.p.skips { // each step may follow the decision of a group
		return nil
	}
	steps := g.p.plan.steps
	return func(bits uint32) code.Label {
		next := i + 1
		for next < len(steps) && next < i+maxOmitted && g.p.required[steps[next].rule]&bits == bits {
			next++
		}
		if next == i+1 {
			return 0
		}
		return starts[next]
	}
}

// maxOmitted is the maximum number of rules skipped by one jump.
const maxOmitted = 256

// required returns the absence bits known to be clear if a rule matches. It returns 0 for rules with rates, because
// these may count packets without matching.
func required(r Rule) (bits uint32) {
	terms := []expr.Node{r.Match.Root}
	if and, ok := r.Match.Root.(*expr.And); ok {
		terms = and.X
	}
	for _, n := range terms {
		bits |= implied(n)
	}
	if bits&noTCP != 0 { // a complete header includes its beginning
		bits |= noFlags
	}
	if bits&noFlags != 0 {
		bits |= noPorts
	}
	expr.Walk(r.Match.Root, func(n expr.Node) {
		if _, rate := n.(*expr.Rate); rate {
			bits = 0
		}
	})
	return bits
}

// testRule generates a rule tested in turn.
func (g *gen) testRule(i int, decided code.Label) {
	r := g.p.rules[i]
	t, f := g.Label(), g.Label()
	start := len(g.Ins)
	g.rule, g.fails = r.Match, f
	if r.of != nil {
		g.rule = r.of
	}
	g.node(r.Match.Root, t, f)
	if g.pending += pending(g.Ins[start:]); g.pending > maxPending {
		g.fail(fmt.Errorf("%w: rule %d exceeds the limit of about 4,000 rules tested in turn: "+
			"compare the same fields by == only, for any number of rules, or use sets, lists or several filters", ErrTooLarge, i+1))
	}
	for j := start; g.Noted && j < len(g.Ins); j++ {
		if g.Ins[j].Here == 0 {
			g.Notes[j] = ruleNote(i, r.Name, g.Notes[j])
			break
		}
	}
	g.Bind(t)
	if g.Noted {
		g.Note = fmt.Sprintf("rule %d: %s", i+1, r.Action)
	}
	if r.Action == Count {
		g.Op(asm.Mov.Imm(asm.R1, int32(i)))
		g.count()
	} else {
		g.Op(asm.Mov.Imm(asm.R9, g.p.decision(i)))
		g.GoTo(decided)
	}
	g.Bind(f)
}

// maxPending bounds the branches kept by the verifier. BPF_COMPLEXITY_LIMIT_JMP_SEQ is 8,192, and the dissection and
// a rule's own branches use some.
const maxPending = 8000

// pending returns a rule's branches still unfollowed by the verifier at the beginning of the next rule: the
// conditional jumps before the first unconditional one.
func pending(ins []code.Insn) (n int) {
	for i := range ins {
		switch x := &ins[i]; {
		case x.Here != 0 || x.To == 0:
		case x.IsJa():
			return n
		default:
			n++
		}
	}
	return n
}

func ruleNote(i int, name, note string) string {
	if name != "" {
		name = " " + name
	}
	return fmt.Sprintf("rule %d%s: %s", i+1, name, note)
}

// addPacket adds the packet to the element in R1 and leaves the element's address on the stack.
func (g *gen) addPacket(none code.Label) {
	g.Op(asm.StoreMem(asm.RFP, g.scratchOff, asm.R1, asm.Word))
	g.Op(stack(asm.R2, int32(g.scratchOff))...)
	g.Op(asm.LoadMapPtr(asm.R1, 0).WithReference(CountsName), asm.FnMapLookupElem.Call())
	g.Jump(asm.JEq.Imm(asm.R0, 0, ""), none)
	g.Op(asm.LoadMem(asm.R1, asm.R0, 0, asm.DWord), asm.Add.Imm(asm.R1, 1), asm.StoreMem(asm.R0, 0, asm.R1, asm.DWord),
		asm.LoadMem(asm.R1, asm.R0, 8, asm.DWord), asm.LoadMem(asm.R2, asm.R8, imgLen, asm.Word),
		asm.Add.Reg(asm.R1, asm.R2), asm.StoreMem(asm.R0, 8, asm.R1, asm.DWord), asm.StoreMem(asm.RFP, g.scratchOff, asm.R0, asm.DWord))
}

// now stores the time in the element found by addPacket.
func (g *gen) now() {
	if g.o.Kernel.CoarseClock {
		g.Op(asm.FnKtimeGetCoarseNs.Call())
	} else {
		g.Op(asm.FnKtimeGetNs.Call())
	}
	g.Op(asm.LoadMem(asm.R1, asm.RFP, g.scratchOff, asm.DWord), asm.StoreMem(asm.R1, 16, asm.R0, asm.DWord))
}

// countRare adds a rare packet to an element. It reads the clock for each.
func (g *gen) countRare(element int32) {
	none := g.Label()
	g.Op(asm.Mov.Imm(asm.R1, element))
	g.addPacket(none)
	g.now()
	g.Bind(none)
}

// count adds the packet to the element in R1.
func (g *gen) count() {
	none := g.Label()
	g.countOr(none, none)
}

// countOr adds the packet to the element in R1 and continues at none. Without such an element it jumps to lost.
func (g *gen) countOr(lost, none code.Label) {
	g.addPacket(lost)
	// The clock is read once per tick, because it costs as much as loading headers. Reading the tick is one
	// instruction.
	g.Op(asm.FnJiffies64.Call(), asm.LoadMem(asm.R1, asm.RFP, g.scratchOff, asm.DWord), asm.LoadMem(asm.R2, asm.R1, 24, asm.DWord))
	g.Jump(asm.JEq.Reg(asm.R0, asm.R2, ""), none)
	g.Op(asm.StoreMem(asm.R1, 24, asm.R0, asm.DWord))
	g.now()
	g.Bind(none)
}

// verdicts has the return codes of programs: pass, then drop.
var verdicts = map[Hook][2]int32{
	Socket:    {0x7fffffff, 0},
	XTBPF:     {0, 1},
	Netfilter: {1, 0},  // NF_ACCEPT, NF_DROP
	TC:        {-1, 2}, // TC_ACT_UNSPEC, TC_ACT_SHOT
	XDP:       {2, 1},  // XDP_PASS, XDP_DROP
}

// Verdict returns the return code for Pass or Drop at this hook.
func (h Hook) Verdict(a Action) uint32 { return uint32(verdicts[h][a]) }

func (g *gen) verdict() {
	v := verdicts[g.o.Hook]
	drop := g.Label()
	g.Jump(asm.JSet.Imm(asm.R9, 1, ""), drop)
	g.Note = "pass"
	g.Op(asm.Mov.Imm(asm.R0, v[Pass]), asm.Return())
	g.Bind(drop)
	g.Note = "drop"
	g.Op(asm.Mov.Imm(asm.R0, v[Drop]), asm.Return())
}
