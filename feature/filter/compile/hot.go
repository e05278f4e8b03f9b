// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"github.com/cilium/ebpf/asm"

	"github.com/weir-project/weir/feature/filter/compile/code"
)

// dissect generates the code to fill the image. It ends with the absence bits stored there.
//
// Registers: R6 is the context, R8 the image, R7 the absence bits, and R9 the offset of the next header.
func (g *gen) dissect() {
	g.done = g.Label()
	g.Note = "the image, with values unknown to the verifier"
	g.Op(asm.Mov.Reg(asm.R6, asm.R1))
	g.Op(asm.Mov.Reg(asm.R8, asm.RFP), asm.Add.Imm(asm.R8, stackImage))
	g.length()
	if g.need == 0 {
		g.Op(asm.StoreMem(asm.R8, imgLen, asm.R0, asm.Word))
		return
	}
	if !g.o.Kernel.Unwritten {
		g.Op(asm.Mov.Reg(asm.R1, asm.R0), asm.LSh.Imm(asm.R1, 32), asm.Or.Reg(asm.R1, asm.R0))
		for _, at := range words(g.need) {
			g.Op(asm.StoreMem(asm.R8, at, asm.R1, asm.Word))
		}
		if usesXor(g.p.rules) {
			g.Op(asm.StoreMem(asm.RFP, xorWord-4, asm.R1, asm.Word), asm.StoreMem(asm.RFP, xorWord, asm.R1, asm.Word))
		}
	}
	g.Op(asm.StoreMem(asm.R8, imgLen, asm.R0, asm.Word))
	g.Op(asm.Mov.Imm(asm.R7, -1))
	p := &paths{cold: g.Label(), blank: g.Label(), v6: g.Label(), l4: g.Label()}
	g.hot(p)
	g.Bind(p.cold)
	if !g.inPlace() {
		g.open(p.blank)
	}
	g.fill(0, imgSpare, asm.R1)
	if g.o.Start == Ethernet {
		g.ethernet()
	}
	if g.need&^anyLink != 0 {
		g.internet(p)
	} else {
		g.GoTo(g.done)
	}
	g.Bind(p.blank)
	g.fill(0, imgSpare, asm.R1)
	g.Bind(g.done)
	g.Op(asm.StoreMem(asm.R8, imgAbsent, asm.R7, asm.Word))
	if g.merged != nil {
		g.Op(asm.StoreMem(asm.R8, imgMaybe, asm.R7, asm.Word))
	}
}

// paths are the labels connecting the fast path with the general one.
type paths struct {
	cold  code.Label // step-by-step dissection
	blank code.Label // nothing is readable
	v6    code.Label // IPv6 header in the image, R9 is its offset
	l4    code.Label // transport header bytes in the image, R9 is their offset, R0 the protocol
}

// fill initialises the headers in the image from an offset on, where loads may not, with a word unknown to the verifier.
// It uses a register.
func (g *gen) fill(from int16, word int16, r asm.Register) {
	if g.o.Kernel.Unwritten {
		return
	}
	g.Op(asm.LoadMem(r, asm.R8, word, asm.Word))
	for i := from; i < imgTag0; i += 4 {
		g.Op(asm.StoreMem(asm.R8, i, r, asm.Word))
	}
}

// hot generates the fast path for most packets: no tag, no IPv4 options, at least 40 bytes. One load reads all
// headers, because each load costs as much as a dozen rules. Other packets restart at cold.
func (g *gen) hot(p *paths) {
	l3, first, size := int32(0), int32(imgIP), int32(40)
	if g.o.Start == Ethernet {
		l3, first, size = 14, imgEth, 54
	}
	if g.need&^anyLink == 0 {
		return
	}
	g.Note = "all headers at once"
	if !g.reads(size) {
		g.open(p.cold)
	}
	g.Op(asm.Mov.Imm(asm.R2, 0))
	all := func(r asm.Register) []asm.Instruction { return image(r, first) }
	if g.reads(size) {
		g.direct(size, p.cold)
		g.copy(all, l3+20)
	} else {
		g.help(all, size, true)
		g.Jump(asm.JNE.Imm(asm.R0, 0, ""), p.cold)
	}
	if g.o.Hook == TC && g.need&anyLink != 0 { // otherwise no rule depends on a tag removed by the kernel
		g.Op(asm.LoadMem(asm.R2, asm.R6, skbVlanPresent, asm.Word))
		g.Jump(asm.JNE.Imm(asm.R2, 0, ""), p.cold)
	}
	six := g.Label()
	g.Op(asm.LoadMem(asm.R2, asm.R8, imgIP, asm.Byte))
	type4, type6 := int32(0x45), int32(6)
	if g.o.Start == Ethernet {
		type4, type6 = typeAnd(etherIPv4, 0x45, 8), typeAnd(etherIPv6, 6, 4)
		g.Op(asm.LoadMem(asm.R0, asm.R8, imgEth+12, asm.Half), asm.LSh.Imm(asm.R0, 8), asm.Or.Reg(asm.R2, asm.R0))
	}
	g.Jump(asm.JNE.Imm(asm.R2, type4, ""), six)
	g.behindIP(l3+20, imgL4, int32(g.transportSize()))
	if g.reads(size) && g.need&anyIP6 != 0 { // the verifier does not know that rules for IPv6 are skipped
		g.fill(imgIP+20, imgLen, asm.R0)
	}
	g.hotHeader(l3)
	g.hot4(p)
	g.Bind(six)
	g.Op(asm.RSh.Imm(asm.R2, 4))
	g.Jump(asm.JNE.Imm(asm.R2, type6, ""), p.cold)
	if g.wants6() && g.reads(size) {
		g.behindIP(l3+20, imgIP+20, min(20, int32(ipEnd(g.p.rules))-20))
	}
	g.hotHeader(l3)
	if !g.wants6() {
		g.GoTo(g.done)
		return
	}
	g.GoTo(p.v6)
}

// behindIP copies n bytes after the first 20 of the IP header to their place in the image. They come from the packet
// at R1, or from the bytes loaded by a helper.
func (g *gen) behindIP(at int32, to int16, n int32) {
	if g.inPlace() {
		g.copyFrom(func(r asm.Register) []asm.Instruction { return image(r, int32(to)) }, int16(at), n)
		return
	}
	for i := int16(0); i < int16(n); i += 4 {
		g.Op(asm.LoadMem(asm.R1, asm.R8, imgIP+20+i, asm.Word), asm.StoreMem(asm.R8, to+i, asm.R1, asm.Word))
	}
}

// wants6 reports whether any rule uses fields of IPv6 packets.
func (g *gen) wants6() bool {
	return g.need&anyIP6 != 0 || g.need&anyL4 != 0 && !onlyIPv4(g.p.rules)
}

func (g *gen) hotHeader(l3 int32) {
	if l3 != 0 {
		g.found(noEth)
	}
	g.Op(asm.Mov.Imm(asm.R9, l3), asm.StoreMem(asm.R8, imgL3, asm.R9, asm.Word))
}

// transportSize returns the number of needed transport header bytes.
func (g *gen) transportSize() (size int16) {
	for _, t := range transports {
		if g.wants(t) {
			size = max(size, int16(t.size))
		}
	}
	return size
}

// hot4 continues with an IPv4 header without options and the bytes after it in the image.
func (g *gen) hot4(p *paths) {
	g.found(noIP4)
	if g.need&anyL4 == 0 {
		g.GoTo(g.done)
		return
	}
	g.Op(asm.Add.Imm(asm.R9, 20))
	g.end4()
	if g.o.Start != Transport {
		g.Jump(asm.JEq.Imm(asm.R0, nextAH, ""), p.cold)
	}
	g.launder(asm.R9, imgAt) // same state as on the other path, so the verifier follows the common code once
	g.clip()
	g.GoTo(p.l4)
}
