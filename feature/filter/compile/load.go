// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"github.com/cilium/ebpf/asm"

	"github.com/weir-project/weir/feature/filter/compile/code"
	"github.com/weir-project/weir/feature/filter/compile/running"
)

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
)

const headerFromNet = 1 // BPF_HDR_START_NET

// maxOffset is the maximum offset read by XDP: the verifier requires offsets below 64 KiB.
const maxOffset = 0xfe00

// stack loads the address of a stack location to a register.
func stack(r asm.Register, off int32) []asm.Instruction {
	return []asm.Instruction{asm.Mov.Reg(r, asm.RFP), asm.Add.Imm(r, off)}
}

func image(r asm.Register, off int32) []asm.Instruction {
	return []asm.Instruction{asm.Mov.Reg(r, asm.R8), asm.Add.Imm(r, off)}
}

// load copies n bytes of the packet from offset R2 to dst, or jumps to fail. early means the transport header is not
// found yet; at netfilter, a dynptr is then open. It clobbers R0 to R5.
func (g *gen) load(dst func(asm.Register) []asm.Instruction, n int32, fail code.Label, early bool) {
	switch {
	case g.o.Hook == XDP:
		g.direct(n, fail)
		g.copy(dst, n)
	case !early && g.reads(n):
		slow, ok := g.Label(), g.Label()
		g.direct(n, slow)
		g.copy(dst, n)
		g.GoTo(ok)
		g.Bind(slow) // a helper loads bytes outside the linear part
		g.helpLate(dst, n, fail)
		g.Bind(ok)
	case early:
		g.help(dst, n, early)
		g.Jump(asm.JNE.Imm(asm.R0, 0, ""), fail)
	default:
		g.helpLate(dst, n, fail)
	}
}

// helpLate is help with no dynptr open before and after. The verifier treats each dynptr as a different one and would
// verify a loop's turns until it gives up.
func (g *gen) helpLate(dst func(asm.Register) []asm.Instruction, n int32, fail code.Label) {
	if g.o.Hook != Netfilter {
		g.help(dst, n, false)
		g.Jump(asm.JNE.Imm(asm.R0, 0, ""), fail)
		return
	}
	g.Op(asm.StoreMem(asm.R8, imgSaved, asm.R2, asm.Word))
	g.open(fail)
	g.Op(asm.LoadMem(asm.R2, asm.R8, imgSaved, asm.Word))
	g.help(dst, n, false)
	g.Op(asm.Mov.Imm(asm.R1, 0), asm.StoreMem(asm.RFP, code.StackDyn, asm.R1, asm.DWord), asm.StoreMem(asm.RFP, code.StackDyn+8, asm.R1, asm.DWord))
	g.Jump(asm.JNE.Imm(asm.R0, 0, ""), fail)
}

// reads reports whether n bytes of a linear packet can be read directly.
func (g *gen) reads(n int32) bool {
	return g.inPlace() && (g.scratchAt() == 0 || n <= running.MaxScratch)
}

// inPlace reports whether packets are read directly.
func (g *gen) inPlace() bool { return g.o.Hook == XDP || g.o.Hook == TC || g.o.Kernel.Skb != nil }

// help loads bytes through a kernel helper. This takes some 20 ns and also reaches nonlinear data. R0 is nonzero if
// bytes are missing.
func (g *gen) help(dst func(asm.Register) []asm.Instruction, n int32, early bool) {
	if to := dst(asm.R1); to[0].Src == asm.R8 {
		g.Fill(stackImage+int(to[1].Constant), int(n))
	}
	switch {
	case g.o.Hook == Netfilter:
		g.Op(asm.Mov.Reg(asm.R4, asm.R2))
		g.Op(dst(asm.R1)...)
		g.Op(asm.Mov.Imm(asm.R2, n))
		g.Op(stack(asm.R3, code.StackDyn)...)
		g.Op(asm.Mov.Imm(asm.R5, 0), asm.FnDynptrRead.Call())
	case g.o.Start == Transport && early:
		g.Op(asm.Mov.Reg(asm.R1, asm.R6))
		g.Op(dst(asm.R3)...)
		g.Op(asm.Mov.Imm(asm.R4, n), asm.Mov.Imm(asm.R5, headerFromNet), asm.FnSkbLoadBytesRelative.Call())
	default:
		if g.o.Start == Transport {
			g.Op(asm.LoadMem(asm.R0, asm.R8, imgAt, asm.Word), asm.Sub.Reg(asm.R2, asm.R0))
		}
		g.Op(asm.Mov.Reg(asm.R1, asm.R6))
		g.Op(dst(asm.R3)...)
		g.Op(asm.Mov.Imm(asm.R4, n), asm.FnSkbLoadBytes.Call())
	}
}

// copy copies n bytes from the address made readable by direct, in R1.
func (g *gen) copy(dst func(asm.Register) []asm.Instruction, n int32) { g.copyFrom(dst, 0, n) }

// copyFrom is copy from skip bytes later.
func (g *gen) copyFrom(dst func(asm.Register) []asm.Instruction, skip int16, n int32) {
	ins := dst(asm.R3) // base and offset, used by the stores directly
	base, off := ins[0].Src, int16(ins[1].Constant)
	part := func(c code.Copied, ins ...asm.Instruction) {
		at := len(g.Ins)
		for g.Op(ins...); at < len(g.Ins); at++ {
			g.Ins[at].Part = c
		}
	}
	written := func(i int16, w asm.Size) {
		part(code.CopyStores, asm.StoreMem(base, off+i, asm.R0, w))
		// The verifier tracks a value alone at the beginning of a slot of 8 bytes, and would distinguish packets by
		// it. The bytes after such a value are free, except after the first tag.
		if (off+i)%8 == 0 && int(i)+w.Sizeof() == int(n) && (base != asm.R8 || off != imgTag0) {
			part(code.CopyStores, asm.StoreMem(base, off+i+int16(w.Sizeof()), asm.R0, w))
		}
	}
	from, checked := g.scratchAt()+skip, g.scratchAt() != 0
	for i := int16(0); i < int16(n); {
		if left := int16(n) - i; checked && left >= 8 && (off+i)%4 == 0 {
			// A load from kernel memory checks the address. One wide load and a shift cost less than two loads.
			part(code.CopyLoads, asm.LoadMem(asm.R0, asm.R1, from+i, asm.DWord))
			part(code.CopyStores, asm.StoreMem(base, off+i+lowHalf, asm.R0, asm.Word))
			part(code.CopyShifts, asm.RSh.Imm(asm.R0, 32))
			part(code.CopyStores, asm.StoreMem(base, off+i+4-lowHalf, asm.R0, asm.Word))
			i += 8
			continue
		}
		w := width(min(int(n)-int(i), 4))
		// Stack writes must be aligned.
		for (off+i)%int16(w.Sizeof()) != 0 {
			w = width(w.Sizeof() - 1)
		}
		part(code.CopyLoads, asm.LoadMem(asm.R0, asm.R1, from+i, w))
		written(i, w)
		i += int16(w.Sizeof())
	}
}

// lowHalf is the offset of the lower 32 bits of a 64-bit number in memory.
var lowHalf = int16(native.Uint32([]byte{0, 0, 0, 4}) & 4)

// scratchAt is the distance from R1 to the bytes made readable by direct.
func (g *gen) scratchAt() int16 {
	if s := g.o.Kernel.Skb; s != nil && g.o.Hook != TC && g.o.Hook != XDP {
		return s.Scratch
	}
	return 0
}

// direct makes the n bytes at offset R2 readable in packet memory, at R1+scratchAt. R2 is preserved except for reads
// through struct sk_buff.
func (g *gen) direct(n int32, fail code.Label) {
	if g.scratchAt() != 0 {
		g.cast(n, fail)
		return
	}
	data, end := int16(xdpData), int16(xdpDataEnd)
	if g.o.Hook == TC {
		data, end = skbData, skbDataEnd
	}
	if !g.atStart() {
		g.inReach(fail)
	}
	g.Op(asm.LoadMem(asm.R1, asm.R6, data, asm.Word), asm.LoadMem(asm.R3, asm.R6, end, asm.Word),
		asm.Add.Reg(asm.R1, asm.R2), asm.Mov.Reg(asm.R4, asm.R1), asm.Add.Imm(asm.R4, n))
	g.Jump(asm.JGT.Reg(asm.R4, asm.R3, ""), fail)
}

// atStart reports whether the previous instruction set R2 to 0.
func (g *gen) atStart() bool {
	last := g.Ins[len(g.Ins)-1]
	return last.OpCode == asm.Mov.Imm(asm.R2, 0).OpCode && last.Dst == asm.R2 && last.Constant == 0
}

// inReach jumps to fail if the offset in R2 exceeds the verifier's limit for pointers. The verifier of Linux 6.12
// confuses equal registers on unreachable paths and loses the offset's sign. It treats the result of a mask as a new
// number, so a mask without effect comes first.
func (g *gen) inReach(fail code.Label) {
	g.Op(asm.And.Imm(asm.R2, -1))
	g.Jump(asm.JGT.Imm(asm.R2, maxOffset, ""), fail)
}

// cast is direct for program types without direct packet access.
func (g *gen) cast(n int32, fail code.Label) {
	s := g.o.Kernel.Skb
	g.Op(asm.LoadMem(asm.R3, asm.R8, imgLinear, asm.Word), asm.Mov.Reg(asm.R4, asm.R2), asm.Add.Imm(asm.R4, n))
	g.Jump(asm.JGT.Reg(asm.R4, asm.R3, ""), fail)
	g.Op(asm.LoadMem(asm.R1, asm.RFP, stackBase, asm.DWord), asm.Add.Reg(asm.R1, asm.R2), asm.Mov.Imm(asm.R2, s.Type), code.Kfunc(s.Cast),
		asm.Mov.Reg(asm.R1, asm.R0))
}

// width returns the widest access of at most n bytes.
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

// length loads the number of bytes visible to the hook to R0. It records their address for reads through struct
// sk_buff.
func (g *gen) length() {
	switch g.o.Hook {
	case XDP:
		g.Op(asm.LoadMem(asm.R1, asm.R6, xdpData, asm.Word), asm.LoadMem(asm.R0, asm.R6, xdpDataEnd, asm.Word), asm.Sub.Reg(asm.R0, asm.R1))
	case Netfilter:
		g.Op(asm.LoadMem(asm.R1, asm.R6, running.NfSkb, asm.DWord), asm.LoadMem(asm.R0, asm.R1, g.o.Kernel.SkbLen, asm.Word))
	default:
		if g.scratchAt() != 0 && g.need != 0 {
			g.Op(code.Kfunc(g.o.Kernel.Skb.Context), asm.Mov.Reg(asm.R1, asm.R0))
		}
		g.Op(asm.LoadMem(asm.R0, asm.R6, skbLen, asm.Word))
	}
	if g.scratchAt() == 0 || g.need == 0 {
		return
	}
	s := g.o.Kernel.Skb
	g.Op(s.Ends(g.o.Hook != Netfilter)...)
	g.Op(asm.Add.Imm(asm.R2, -int32(s.Scratch)), asm.StoreMem(asm.RFP, stackBase, asm.R2, asm.DWord),
		asm.StoreMem(asm.R8, imgLinear, asm.R3, asm.Word))
}

// open creates the dynptr for netfilter helpers.
func (g *gen) open(fail code.Label) {
	if g.o.Hook != Netfilter {
		return
	}
	g.Op(asm.LoadMem(asm.R1, asm.R6, running.NfSkb, asm.DWord), asm.Mov.Imm(asm.R2, 0))
	g.Op(stack(asm.R3, code.StackDyn)...)
	g.Op(code.Kfunc(g.o.Kernel.DynptrSkb))
	g.Jump(asm.JNE.Imm(asm.R0, 0, ""), fail)
}

// swapped returns the value read by this machine from a number stored in network byte order.
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
