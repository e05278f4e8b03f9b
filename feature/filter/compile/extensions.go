// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"github.com/cilium/ebpf/asm"

	"github.com/weir-project/weir/feature/filter/compile/code"
	"github.com/weir-project/weir/feature/filter/expr"
)

// extensionNumbers has a bit for each walked extension header.
const extensionNumbers = 1<<nextHopOpts | 1<<nextRouting | 1<<nextFragment | 1<<nextAH | 1<<nextDstOpts

// isExtension jumps to ext if R0 is the number of an extension header. It clobbers R1 to R3.
func isExtension(g *gen, ext code.Label) {
	// Numbers above 63 use their lower bits for the lookup. The result is then masked out.
	g.Op(asm.LoadImm(asm.R1, extensionNumbers, asm.DWord), asm.Mov.Reg(asm.R2, asm.R0), asm.And.Imm(asm.R2, 63), asm.RSh.Reg(asm.R1, asm.R2),
		asm.Mov.Reg(asm.R3, asm.R0), asm.Sub.Imm(asm.R3, 64), asm.RSh.Imm(asm.R3, 63), asm.And.Reg(asm.R1, asm.R3))
	g.Jump(asm.JNE.Imm(asm.R1, 0, ""), ext)
}

// extensions walks the extension headers, with the first one's number in imgSpare and offset in imgAt. It jumps to
// out at a later fragment and to broken at an incomplete chain. Otherwise it jumps to found with the transport
// protocol in R0.
func (g *gen) extensions(out, broken, found code.Label) {
	g.repeat(expr.MaxExtensions, func() { g.extension(out, broken, found) })
	g.GoTo(broken)
}

func (g *gen) extension(out, broken, found code.Label) {
	g.Note = "an extension header"
	g.Op(asm.LoadMem(asm.R9, asm.R8, imgAt, asm.Word))
	g.fits(8, broken)
	g.Op(asm.Mov.Reg(asm.R2, asm.R9))
	g.load(func(r asm.Register) []asm.Instruction { return stack(r, int32(g.scratchOff)) }, 8, broken, true)
	g.Op(asm.LoadMem(asm.R0, asm.R8, imgSpare, asm.Word), asm.LoadMem(asm.R1, asm.RFP, g.scratchOff+1, asm.Byte))
	for _, e := range []struct {
		next int32
		bit  uint32
	}{{nextHopOpts, noHopOpts}, {nextRouting, noRouting}, {nextDstOpts, noDstOpts}} {
		if g.need&e.bit != 0 {
			other := g.Label()
			g.Jump(asm.JNE.Imm(asm.R0, e.next, ""), other)
			g.foundInImage(e.bit)
			g.Bind(other)
		}
	}
	// No branches: the verifier would follow each of them in each turn. R3 is all ones for a fragment header, without
	// a length in its second byte. R4 is 1 for an authentication header, with a length in units of 4 bytes.
	is := func(r asm.Register, next int) {
		g.Op(asm.LoadImm(r, 1<<next, asm.DWord), asm.RSh.Reg(r, asm.R0), asm.And.Imm(r, 1))
	}
	is(asm.R3, nextFragment)
	g.Op(asm.Neg.Imm(asm.R3, 0))
	is(asm.R4, nextAH)
	g.Op(asm.LSh.Imm(asm.R1, 3), asm.RSh.Reg(asm.R1, asm.R4),
		asm.LoadMem(asm.R2, asm.RFP, g.scratchOff+2, asm.Half), asm.And.Reg(asm.R2, asm.R3), // 0 for other headers
		asm.Xor.Imm(asm.R3, -1), asm.And.Reg(asm.R1, asm.R3))
	if g.need&noFrag != 0 {
		other := g.Label()
		g.Jump(asm.JNE.Imm(asm.R0, nextFragment, ""), other)
		g.Op(asm.StoreMem(asm.R8, imgFrag, asm.R2, asm.Half), asm.Mov.Reg(asm.R3, asm.R2))
		g.foundInImage(noFrag)
		g.Op(asm.Mov.Reg(asm.R2, asm.R3))
		g.Bind(other)
	}
	g.Note = "a later fragment has no transport header"
	g.Jump(asm.JSet.Imm(asm.R2, int32(swapped(0xfff8, asm.Half)), ""), out)
	// The next check against the packet's end covers this header too.
	g.Op(asm.Add.Reg(asm.R9, asm.R1), asm.Add.Imm(asm.R9, 8), asm.StoreMem(asm.R8, imgAt, asm.R9, asm.Word), asm.LoadMem(asm.R0, asm.RFP, g.scratchOff, asm.Byte),
		asm.StoreMem(asm.R8, imgSpare, asm.R0, asm.Word))
	more := g.Label()
	isExtension(g, more)
	g.Op(asm.LoadMem(asm.R7, asm.R8, imgAbsent, asm.Word), asm.LoadMem(asm.R9, asm.R8, imgAt, asm.Word))
	g.GoTo(found)
	g.Bind(more)
}
