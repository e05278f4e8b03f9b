// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"fmt"
	"regexp/syntax"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/weir-project/weir/feature/filter/compile/automaton"
	"github.com/weir-project/weir/feature/filter/compile/code"
	"github.com/weir-project/weir/feature/filter/expr"
)

func (g *gen) contains(n *expr.Contains, t, f code.Label) {
	p, err := automaton.Literal(n.V)
	if err != nil {
		g.fail(err)
		return
	}
	g.scan(n.X, p, t, f)
}

func (g *gen) matches(n *expr.Matches, t, f code.Label) { g.scan(n.X, n.Pattern.Prog, t, f) }

// Maximum number of scans in a program. If the verifier follows each byte, a scan takes 20,000 to 70,000 of its
// million steps. With may_goto it takes some hundred.
const (
	maxScans  = 256
	maxWalked = 8
)

// State of a scan preserved across loads: offsets from R8.
const (
	scanState = imgSpare
	scanEnd   = imgAt2
	scanByte  = imgSaved       // index of the byte in its piece
	scanAt    = stackSaved - 8 // from the frame pointer
)

// scan runs an automaton over the first Window bytes of the operand.
func (g *gen) scan(x expr.Operand, p *syntax.Prog, t, f code.Label) {
	g.slice(x, -1, f)
	a, err := automaton.New(p)
	if err != nil {
		g.fail(err)
		return
	}
	if a.Table == nil {
		g.GoTo(t)
		return
	}
	most := maxScans
	if !g.o.Kernel.MayGoto {
		most = maxWalked
	}
	if g.p.patterns == most {
		g.fail(fmt.Errorf("%w: more than %d contains and matches terms in one program (%d before Linux 6.9)", ErrTooLarge, most, maxWalked))
		return
	}
	g.p.patterns++
	base := len(g.p.automata)
	g.p.automata = append(g.p.automata, a.Table...)
	short := g.Label()
	g.Op(asm.Mov.Reg(asm.R0, asm.R2), asm.Add.Imm(asm.R0, expr.Window))
	g.Jump(asm.JLE.Reg(asm.R3, asm.R0, ""), short)
	g.Op(asm.Mov.Reg(asm.R3, asm.R0))
	g.Bind(short)
	s := &scan{g: g, base: uint32(base), size: len(a.Table), t: t, f: f, end: g.Label()}
	if g.o.Hook == XDP {
		s.direct()
	} else {
		s.chunks()
	}
	g.Bind(s.end)
	g.Note = "the end of the searched bytes"
	g.Op(asm.Mov.Imm(asm.R2, int32(len(a.Table)/256-1)<<8), asm.Or.Reg(asm.R0, asm.R2))
	s.lookup()
	g.Jump(asm.JNE.Imm(asm.R0, 0, ""), t)
	g.GoTo(f)
}

type scan struct {
	g         *gen
	base      uint32 // offset of its automaton in the common map
	size      int    // a power of two
	t, f, end code.Label
}

// automataName is the map with all automata, one after the other: a program has at most 64 maps.
const automataName = "filter_automata"

// automataMap creates that map after all rules are generated.
func (p *Program) automataMap() {
	if len(p.automata) == 0 {
		return
	}
	p.Spec.Maps[automataName] = &ebpf.MapSpec{Name: automataName, Type: ebpf.Array, KeySize: 4, ValueSize: uint32(len(p.automata)), MaxEntries: 1,
		Flags: readOnlyProgram, Contents: []ebpf.MapKV{{Key: uint32(0), Value: p.automata}}}
}

// lookup reads the table at index R0. It clobbers R3.
func (s *scan) lookup() {
	s.g.Op(asm.And.Imm(asm.R0, int32(s.size-1)), asm.LoadMapValue(asm.R3, 0, s.base).WithReference(automataName),
		asm.Add.Reg(asm.R3, asm.R0), asm.LoadMem(asm.R0, asm.R3, 0, asm.Byte))
}

// step advances the state in R0 by the byte in R2.
func (s *scan) step() {
	s.g.Op(asm.LSh.Imm(asm.R0, 8), asm.Or.Reg(asm.R0, asm.R2))
	s.lookup()
	s.g.Jump(asm.JEq.Imm(asm.R0, automaton.Accepts, ""), s.t)
	s.g.Jump(asm.JEq.Imm(asm.R0, automaton.Dead, ""), s.f)
}

// chunk is the number of bytes loaded at once.
const chunk = 64

// chunks loads the bytes from R2 to R3 piece by piece. It leaves the state in R0.
func (s *scan) chunks() {
	g := s.g
	g.Op(asm.StoreMem(asm.RFP, scanAt, asm.R2, asm.DWord), asm.StoreMem(asm.R8, scanEnd, asm.R3, asm.Word),
		asm.Mov.Imm(asm.R0, 0), asm.StoreMem(asm.R8, scanState, asm.R0, asm.Word))
	g.open(s.f)
	for i := int16(0); i < chunk; i += 4 { // before Linux 6.3, memory filled partly by a helper must be initialised
		g.Op(asm.StoreImm(asm.RFP, g.scratchOff+i, 0, asm.Word))
	}
	if g.o.Kernel.MayGoto {
		g.repeat(expr.Window/chunk, s.chunk)
	} else { // R7, the counter of repeat, counts the bytes
		for range expr.Window / chunk {
			s.chunk()
		}
	}
	g.Op(asm.LoadMem(asm.R0, asm.R8, scanState, asm.Word))
}

// chunk loads the next piece, if any, and runs the automaton over it.
func (s *scan) chunk() {
	g := s.g
	some := g.Label()
	g.Op(asm.LoadMem(asm.R0, asm.R8, scanState, asm.Word), asm.LoadMem(asm.R2, asm.RFP, scanAt, asm.DWord),
		asm.LoadMem(asm.R4, asm.R8, scanEnd, asm.Word), asm.Sub.Reg(asm.R4, asm.R2))
	g.Jump(asm.JSLE.Imm(asm.R4, 0, ""), s.end)
	g.Jump(asm.JLE.Imm(asm.R4, chunk, ""), some)
	g.Op(asm.Mov.Imm(asm.R4, chunk))
	g.Bind(some)
	g.Op(asm.Mov.Reg(asm.R7, asm.R4), asm.Mov.Reg(asm.R0, asm.R2), asm.Add.Reg(asm.R0, asm.R4), asm.StoreMem(asm.RFP, scanAt, asm.R0, asm.DWord))
	g.loadSome(s.f)
	g.Op(asm.Mov.Reg(asm.R5, asm.R7), asm.LoadMem(asm.R0, asm.R8, scanState, asm.Word))
	s.bytes(chunk, func(at asm.Register) {
		g.Op(asm.Mov.Reg(asm.R1, asm.RFP), asm.Add.Imm(asm.R1, int32(g.scratchOff)), asm.Add.Reg(asm.R1, at), asm.LoadMem(asm.R2, asm.R1, 0, asm.Byte))
	})
	g.Op(asm.StoreMem(asm.R8, scanState, asm.R0, asm.Word))
}

// bytes runs the automaton over R5 bytes, at most n, a power of two. read loads the byte at the given index to R2.
// The verifier follows a counter in R7 through every turn. It does not track a counter in memory, bounded by a mask
// only.
func (s *scan) bytes(n int32, read func(at asm.Register)) {
	g := s.g
	loop, done := g.Label(), g.Label()
	if !g.o.Kernel.MayGoto {
		g.Op(asm.Mov.Imm(asm.R7, 0))
		g.Bind(loop)
		read(asm.R7)
		s.step()
		g.Op(asm.Add.Imm(asm.R7, 1))
		g.Jump(asm.JGE.Reg(asm.R7, asm.R5, ""), done)
		g.Jump(asm.JLT.Imm(asm.R7, n, ""), loop)
		g.Bind(done)
		return
	}
	g.zero(scanByte, asm.R3)
	g.Bind(loop)
	g.Jump(code.MayGoto(0), done)
	g.Op(asm.LoadMem(asm.R3, asm.R8, scanByte, asm.Word), asm.And.Imm(asm.R3, n-1))
	read(asm.R3)
	s.step()
	g.Op(asm.LoadMem(asm.R3, asm.R8, scanByte, asm.Word), asm.Add.Imm(asm.R3, 1), asm.StoreMem(asm.R8, scanByte, asm.R3, asm.Word))
	g.Jump(asm.JGE.Reg(asm.R3, asm.R5, ""), done)
	g.Jump(asm.JLT.Imm(asm.R3, n, ""), loop)
	g.Bind(done)
}

// loadSome loads R4 bytes at R2, 1 to chunk, to the scratch area.
func (g *gen) loadSome(fail code.Label) {
	if g.o.Hook == Netfilter {
		g.Op(asm.Mov.Reg(asm.R0, asm.R2), asm.Mov.Reg(asm.R2, asm.R4), asm.Mov.Reg(asm.R4, asm.R0))
		g.Op(stack(asm.R1, int32(g.scratchOff))...)
		g.Op(stack(asm.R3, code.StackDyn)...)
		g.Op(asm.Mov.Imm(asm.R5, 0), asm.FnDynptrRead.Call())
	} else {
		if g.o.Start == Transport {
			g.Op(asm.LoadMem(asm.R0, asm.R8, imgAt, asm.Word), asm.Sub.Reg(asm.R2, asm.R0))
		}
		g.Op(asm.Mov.Reg(asm.R1, asm.R6))
		g.Op(stack(asm.R3, int32(g.scratchOff))...)
		g.Op(asm.FnSkbLoadBytes.Call())
	}
	g.Jump(asm.JNE.Imm(asm.R0, 0, ""), fail)
}

// direct reads the bytes from R2 to R3 in packet memory. It leaves the state in R0.
func (s *scan) direct() {
	g := s.g
	g.Op(asm.Mov.Imm(asm.R0, 0), asm.Mov.Reg(asm.R5, asm.R3), asm.Sub.Reg(asm.R5, asm.R2))
	g.Jump(asm.JSLE.Imm(asm.R5, 0, ""), s.end)
	g.inReach(s.f)
	g.Op(asm.LoadMem(asm.R1, asm.R6, xdpData, asm.Word), asm.LoadMem(asm.R4, asm.R6, xdpDataEnd, asm.Word), asm.Add.Reg(asm.R1, asm.R2))
	s.bytes(expr.Window, func(at asm.Register) {
		g.Op(asm.Mov.Reg(asm.R2, asm.R1), asm.Add.Reg(asm.R2, at), asm.Mov.Reg(asm.R3, asm.R2), asm.Add.Imm(asm.R3, 1))
		g.Jump(asm.JGT.Reg(asm.R3, asm.R4, ""), s.f)
		g.Op(asm.LoadMem(asm.R2, asm.R2, 0, asm.Byte))
	})
}
