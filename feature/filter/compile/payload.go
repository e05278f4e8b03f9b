// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"github.com/cilium/ebpf/asm"

	"github.com/weir-project/weir/feature/filter/compile/code"
	"github.com/weir-project/weir/feature/filter/expr"
)

// offset loads one end of a slice: an offset from the start of the payload or, if negative, from its end.
func (g *gen) offset(r asm.Register, n int, open bool) {
	from := int16(imgBody)
	if n < 0 || open {
		from = imgEnd
	}
	g.Op(asm.LoadMem(r, asm.R8, from, asm.Word))
	if n != 0 && !open {
		g.Op(asm.Add.Imm(r, int32(n)))
	}
}

// slice sets R2 and R3 to the start and end offset of a part of the payload in the packet. It jumps to f if the part
// is missing, or has another length than want (-1: any).
func (g *gen) slice(x expr.Operand, want int, f code.Label) {
	g.there(noPayload, f)
	if x.Part == expr.Whole {
		x.From, x.Open = 0, true
	}
	g.offset(asm.R2, x.From, false)
	n, fixed := x.Size()
	if want < 0 || !fixed || !x.Open && x.To >= 0 {
		g.offset(asm.R3, x.To, x.Open)
	}
	if x.From < 0 {
		g.Op(asm.LoadMem(asm.R0, asm.R8, imgBody, asm.Word))
		g.Jump(asm.JSLT.Reg(asm.R2, asm.R0, ""), f)
	}
	if !x.Open && x.To >= 0 {
		g.Op(asm.LoadMem(asm.R0, asm.R8, imgEnd, asm.Word))
		g.Jump(asm.JSGT.Reg(asm.R3, asm.R0, ""), f)
	}
	switch {
	case fixed && want >= 0 && n != want:
		g.GoTo(f)
	case fixed:
	case want >= 0:
		g.Op(asm.Mov.Reg(asm.R0, asm.R3), asm.Sub.Reg(asm.R0, asm.R2))
		g.Jump(asm.JNE.Imm(asm.R0, int32(want), ""), f)
	default:
		g.Jump(asm.JSGT.Reg(asm.R2, asm.R3, ""), f)
	}
}

// payloadByte loads one byte of the payload to R0.
func (g *gen) payloadByte(x expr.Operand, f code.Label) {
	x.Part, x.To, x.Open = expr.Slice, x.From+1, x.From == -1
	g.slice(x, 1, f)
	g.loadAt(0, 1, f)
	base, off := g.loaded()
	g.Op(asm.LoadMem(asm.R0, base, off, asm.Byte))
}

// loadAt makes n bytes at R2+off readable at the address returned by loaded.
func (g *gen) loadAt(off, n int32, f code.Label) {
	if off != 0 {
		g.Op(asm.Add.Imm(asm.R2, off))
	}
	if g.o.Hook == XDP {
		g.direct(n, f)
		return
	}
	g.load(func(r asm.Register) []asm.Instruction { return stack(r, int32(g.scratchOff)) }, n, f, false)
}

// loaded returns the address of the bytes made readable by loadAt.
func (g *gen) loaded() (asm.Register, int16) {
	if g.o.Hook == XDP {
		return asm.R1, 0
	}
	return asm.RFP, g.scratchOff
}

// text compares a part of the payload, or a name.
func (g *gen) text(x expr.Operand, v expr.Value, t, f code.Label) {
	switch x.Field.ID {
	case expr.SIPMethod:
		g.carried(f)
		x = expr.Operand{Field: x.Field, Part: expr.Slice, To: len(v.Bytes) + 1}
		g.slice(x, -1, f)
		g.literal(append([]byte(v.Bytes), ' '), false, f)
	case expr.DNSName:
		wire, err := expr.WireName(string(v.Bytes))
		if err != nil {
			g.fail(err)
			return
		}
		g.there(noQuestion, f)
		x = expr.Operand{Field: x.Field, Part: expr.Slice, From: 12, To: 12 + len(wire)}
		g.slice(x, -1, f)
		g.literal(wire, true, f)
	default:
		g.slice(x, len(v.Bytes), f)
		g.literal(v.Bytes, false, f)
	}
	g.GoTo(t)
}

// carried jumps to f unless the payload belongs to TCP or UDP.
func (g *gen) carried(f code.Label) {
	if g.known&(noTCP|noUDP) != 0 {
		return
	}
	g.Op(asm.LoadMem(asm.R0, asm.R8, imgAbsent, asm.Word), asm.And.Imm(asm.R0, int32(noTCP|noUDP)))
	g.Jump(asm.JEq.Imm(asm.R0, int32(noTCP|noUDP), ""), f)
}

// atOnce is the maximum number of bytes loaded for one comparison.
const atOnce = 64

// literal jumps to f unless the bytes at R2 equal b. With fold, lower-case letters in b match both cases.
func (g *gen) literal(b []byte, fold bool, f code.Label) {
	if len(b) > atOnce {
		g.Op(asm.StoreMem(asm.RFP, stackSaved-8, asm.R2, asm.DWord))
	}
	for at := 0; at < len(b); at += atOnce {
		part := b[at:min(at+atOnce, len(b))]
		if at > 0 {
			g.Op(asm.LoadMem(asm.R2, asm.RFP, stackSaved-8, asm.DWord))
		}
		g.loadAt(int32(at), int32(len(part)), f)
		g.same(part, fold, f)
	}
}

// atBranch is the number of words compared before each branch.
const atBranch = 4

// same compares the loaded bytes.
func (g *gen) same(part []byte, fold bool, f code.Label) {
	base, off := g.loaded()
	for i := 0; len(part) > 0; i++ {
		w := width(min(len(part), 4))
		n := w.Sizeof()
		to := asm.R0
		if i%atBranch > 0 {
			to = asm.R3
		}
		g.Op(asm.LoadMem(to, base, off, w))
		if mask := caseBits(part[:n]); fold && mask != 0 {
			g.Op(asm.Or.Imm32(to, int32(mask)))
		}
		g.Op(asm.Xor.Imm32(to, int32(word(part[:n]))))
		if to != asm.R0 {
			g.Op(asm.Or.Reg(asm.R0, to))
		}
		part, off = part[n:], off+int16(n)
		if i%atBranch == atBranch-1 || len(part) == 0 {
			g.Jump(asm.JNE.Imm(asm.R0, 0, ""), f)
		}
	}
}

// word returns bytes as a number in this machine's byte order.
func word(b []byte) uint32 {
	switch len(b) {
	case 4:
		return native.Uint32(b)
	case 2:
		return uint32(native.Uint16(b))
	}
	return uint32(b[0])
}

// caseBits returns the bits to set for converting letters to lower case.
func caseBits(b []byte) uint32 {
	m := make([]byte, len(b))
	for i, c := range b {
		if c >= 'a' && c <= 'z' {
			m[i] = 'a' - 'A'
		}
	}
	return word(m)
}

// anyMethod jumps to t if the payload begins with capital letters and a space.
func (g *gen) anyMethod(t, f code.Label) {
	g.carried(f)
	for i := range expr.MaxMethod + 1 {
		g.payloadByte(expr.Operand{Field: expr.Lookup(expr.Payload), Part: expr.Byte, From: i}, f)
		if i > 0 {
			g.Jump(asm.JEq.Imm(asm.R0, ' ', ""), t)
		}
		g.Jump(asm.JLT.Imm(asm.R0, 'A', ""), f)
		g.Jump(asm.JGT.Imm(asm.R0, 'Z', ""), f)
	}
	g.GoTo(f)
}
