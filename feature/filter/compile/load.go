// SPDX-License-Identifier: Apache-2.0

package compile

import "github.com/cilium/ebpf/asm"

// Offsets in struct __sk_buff, struct xdp_md and struct bpf_nf_ctx (include/uapi/linux/bpf.h, include/linux/netfilter.h).
const (
	skbLen         = 0
	skbVlanPresent = 20
	skbVlanTCI     = 24
	skbVlanProto   = 28
	skbData        = 76
	skbDataEnd     = 80
	xdpData        = 0
	xdpDataEnd     = 4
	nfSkb          = 8
)

const headerFromNet = 1 // BPF_HDR_START_NET

// mostOffset is the farthest that XDP reads: the verifier wants it below 64 KiB.
const mostOffset = 0xfe00

// stack is the address of a place of the frame in a register.
func stack(r asm.Register, off int32) []asm.Instruction {
	return []asm.Instruction{asm.Mov.Reg(r, asm.RFP), asm.Add.Imm(r, off)}
}

func image(r asm.Register, off int32) []asm.Instruction {
	return []asm.Instruction{asm.Mov.Reg(r, asm.R8), asm.Add.Imm(r, off)}
}

// load copies n bytes of the packet, from the offset in R2, to where dst points, or goes on at fail. early says that the
// transport header is not found yet. It uses R0 to R5.
func (g *gen) load(dst func(asm.Register) []asm.Instruction, n int32, fail label, early bool) {
	switch {
	case g.o.Hook == XDP:
		g.direct(n, fail)
		g.copy(dst, n)
		return
	case g.o.Hook == TC && !early:
		slow, ok := g.label(), g.label()
		g.direct(n, slow)
		g.copy(dst, n)
		g.goTo(ok)
		g.bind(slow) // what is not in the skb's own memory a helper finds
		g.op(asm.Mov.Reg(asm.R1, asm.R6))
		g.op(dst(asm.R3)...)
		g.op(asm.Mov.Imm(asm.R4, n), asm.FnSkbLoadBytes.Call())
		g.jump(asm.JNE.Imm(asm.R0, 0, ""), fail)
		g.bind(ok)
		return
	case g.o.Hook == Netfilter:
		g.op(asm.Mov.Reg(asm.R4, asm.R2))
		g.op(dst(asm.R1)...)
		g.op(asm.Mov.Imm(asm.R2, n))
		g.op(stack(asm.R3, stackDyn)...)
		g.op(asm.Mov.Imm(asm.R5, 0), asm.FnDynptrRead.Call())
	case g.o.Start == Transport && early:
		g.op(asm.Mov.Reg(asm.R1, asm.R6))
		g.op(dst(asm.R3)...)
		g.op(asm.Mov.Imm(asm.R4, n), asm.Mov.Imm(asm.R5, headerFromNet), asm.FnSkbLoadBytesRelative.Call())
	default:
		if g.o.Start == Transport {
			g.op(asm.LoadMem(asm.R0, asm.R8, imgAt, asm.Word), asm.Sub.Reg(asm.R2, asm.R0))
		}
		g.op(asm.Mov.Reg(asm.R1, asm.R6))
		g.op(dst(asm.R3)...)
		g.op(asm.Mov.Imm(asm.R4, n), asm.FnSkbLoadBytes.Call())
	}
	g.jump(asm.JNE.Imm(asm.R0, 0, ""), fail)
}

// copy copies n bytes from where R1 points.
func (g *gen) copy(dst func(asm.Register) []asm.Instruction, n int32) {
	ins := dst(asm.R3) // a base and an offset, which the stores take with them
	base, off := ins[0].Src, int16(ins[1].Constant)
	written := func(i int16, w asm.Size) {
		g.op(asm.StoreMem(base, off+i, asm.R0, w))
		// The verifier follows a value that alone begins a slot of 8 bytes, and would tell packets apart by it. What
		// follows such a value is free, but behind the first tag.
		if (off+i)%8 == 0 && int(i)+w.Sizeof() == int(n) && (base != asm.R8 || off != imgTag0) {
			g.op(asm.StoreMem(base, off+i+int16(w.Sizeof()), asm.R0, w))
		}
	}
	for i := int16(0); i < int16(n); {
		w := width(min(int(n)-int(i), 4))
		// The stack is written where it is aligned.
		for (off+i)%int16(w.Sizeof()) != 0 {
			w = width(w.Sizeof() - 1)
		}
		g.op(asm.LoadMem(asm.R0, asm.R1, i, w))
		written(i, w)
		i += int16(w.Sizeof())
	}
}

// direct has R1 point at the n bytes at R2, in the packet's memory itself: a helper takes 20 ns. R2 stays.
func (g *gen) direct(n int32, fail label) {
	data, end := int16(xdpData), int16(xdpDataEnd)
	if g.o.Hook == TC {
		data, end = skbData, skbDataEnd
	}
	g.jump(asm.JGT.Imm(asm.R2, mostOffset, ""), fail)
	g.op(asm.LoadMem(asm.R1, asm.R6, data, asm.Word), asm.LoadMem(asm.R3, asm.R6, end, asm.Word),
		asm.Add.Reg(asm.R1, asm.R2), asm.Mov.Reg(asm.R4, asm.R1), asm.Add.Imm(asm.R4, n))
	g.jump(asm.JGT.Reg(asm.R4, asm.R3, ""), fail)
}

// width is the widest access of at most n bytes.
func width(n int) asm.Size {
	switch {
	case n >= 8:
		return asm.DWord
	case n >= 4:
		return asm.Word
	case n >= 2:
		return asm.Half
	}
	return asm.Byte
}

// length loads how many bytes the hook sees into R0.
func (g *gen) length() {
	switch g.o.Hook {
	case XDP:
		g.op(asm.LoadMem(asm.R1, asm.R6, xdpData, asm.Word), asm.LoadMem(asm.R0, asm.R6, xdpDataEnd, asm.Word), asm.Sub.Reg(asm.R0, asm.R1))
	case Netfilter:
		g.op(asm.LoadMem(asm.R1, asm.R6, nfSkb, asm.DWord), asm.LoadMem(asm.R0, asm.R1, g.o.Kernel.SkbLen, asm.Word))
	default:
		g.op(asm.LoadMem(asm.R0, asm.R6, skbLen, asm.Word))
	}
}

// open makes the dynptr that loads of netfilter go through.
func (g *gen) open(fail label) {
	if g.o.Hook != Netfilter {
		return
	}
	g.op(asm.LoadMem(asm.R1, asm.R6, nfSkb, asm.DWord), asm.Mov.Imm(asm.R2, 0))
	g.op(stack(asm.R3, stackDyn)...)
	g.op(asm.Instruction{OpCode: asm.OpCode(asm.JumpClass).SetJumpOp(asm.Call), Src: asm.PseudoKfuncCall, Constant: int64(g.o.Kernel.DynptrSkb)})
	g.jump(asm.JNE.Imm(asm.R0, 0, ""), fail)
}

// swapped is a number as it stands in memory in network byte order, read by this machine.
func swapped(v uint32, size asm.Size) uint32 {
	var b [4]byte
	switch size {
	case asm.Word:
		be.PutUint32(b[:], v)
		return native.Uint32(b[:])
	case asm.Half:
		be.PutUint16(b[:], uint16(v))
		return uint32(native.Uint16(b[:]))
	}
	return v
}
