// SPDX-License-Identifier: Apache-2.0

package compile

import "github.com/cilium/ebpf/asm"

// dissect fills the image. It ends with the bits of what is absent in it, and goes on behind.
//
// Registers: R6 is the context, R8 the image, R7 what is absent; R9 is the offset of what comes next.
func (g *gen) dissect() {
	g.done = g.label()
	g.note = "the image, of values that the verifier does not know"
	g.op(asm.Mov.Reg(asm.R6, asm.R1))
	g.op(asm.Mov.Reg(asm.R8, asm.RFP), asm.Add.Imm(asm.R8, stackImage))
	g.length()
	if g.need == 0 {
		g.op(asm.StoreMem(asm.R8, imgLen, asm.R0, asm.Word))
		return
	}
	if !g.o.Kernel.Unwritten {
		g.op(asm.Mov.Reg(asm.R1, asm.R0), asm.LSh.Imm(asm.R1, 32), asm.Or.Reg(asm.R1, asm.R0))
		for _, at := range words(g.need) {
			g.op(asm.StoreMem(asm.R8, at, asm.R1, asm.Word))
		}
		if usesXor(g.p.rules) {
			g.op(asm.StoreMem(asm.RFP, xorWord-4, asm.R1, asm.Word), asm.StoreMem(asm.RFP, xorWord, asm.R1, asm.Word))
		}
	}
	g.op(asm.StoreMem(asm.R8, imgLen, asm.R0, asm.Word))
	g.op(asm.Mov.Imm(asm.R7, -1))
	p := &paths{cold: g.label(), blank: g.label(), v6: g.label(), have: map[uint32]label{}}
	for _, t := range transports {
		p.have[t.bit] = g.label()
	}
	g.hot(p)
	g.bind(p.cold)
	if !g.inPlace() {
		g.open(p.blank)
	}
	g.blank()
	if g.o.Start == Ethernet {
		g.ethernet()
	}
	if g.need&^anyLink != 0 {
		g.internet(p)
	} else {
		g.goTo(g.done)
	}
	g.bind(p.blank)
	g.blank()
	g.bind(g.done)
	g.op(asm.StoreMem(asm.R8, imgAbsent, asm.R7, asm.Word))
}

// paths are where the code for most packets meets the code for all.
type paths struct {
	cold  label            // the packet is taken apart step by step
	blank label            // nothing can be read
	v6    label            // an IPv6 header is in the image, R9 is its offset
	have  map[uint32]label // a transport header is in the image, R9 is its offset
}

// blank initialises what loads do else.
func (g *gen) blank() {
	if g.o.Kernel.Unwritten {
		return
	}
	g.op(asm.LoadMem(asm.R1, asm.R8, imgSpare, asm.Word))
	for i := int16(0); i < imgTag0; i += 4 {
		g.op(asm.StoreMem(asm.R8, i, asm.R1, asm.Word))
	}
}

// hot is the way of most packets: no tag, no IPv4 options, at least 40 bytes. One load brings all headers, and each saved
// costs as much as a dozen rules. Whatever is otherwise begins anew, at cold.
func (g *gen) hot(p *paths) {
	l3, first, size := int32(0), int32(imgIP), int32(40)
	if g.o.Start == Ethernet {
		l3, first, size = 14, imgEth, 54
	}
	if g.need&^anyLink == 0 {
		return
	}
	g.note = "all headers at once"
	if !g.reads(size) {
		g.open(p.cold)
	}
	g.op(asm.Mov.Imm(asm.R2, 0))
	all := func(r asm.Register) []asm.Instruction { return image(r, first) }
	if g.reads(size) { // no more of it than rules ask for
		g.direct(size, p.cold)
		g.copy(all, min(size, l3+int32(max(20+g.transportSize(), ipEnd(g.p.rules)))))
	} else {
		g.help(all, size, true)
		g.jump(asm.JNE.Imm(asm.R0, 0, ""), p.cold)
	}
	if g.o.Hook == TC {
		g.op(asm.LoadMem(asm.R1, asm.R6, skbVlanPresent, asm.Word))
		g.jump(asm.JNE.Imm(asm.R1, 0, ""), p.cold)
	}
	six := g.label()
	g.op(asm.LoadMem(asm.R1, asm.R8, imgIP, asm.Byte))
	if g.o.Start == Ethernet {
		g.op(asm.LoadMem(asm.R0, asm.R8, imgEth+12, asm.Half))
		g.jump(asm.JEq.Imm(asm.R0, int32(swapped(etherIPv6, asm.Half)), ""), six)
		g.jump(asm.JNE.Imm(asm.R0, int32(swapped(etherIPv4, asm.Half)), ""), p.cold)
	} else {
		g.op(asm.Mov.Reg(asm.R0, asm.R1), asm.RSh.Imm(asm.R0, 4))
		g.jump(asm.JEq.Imm(asm.R0, 6, ""), six)
	}
	g.jump(asm.JNE.Imm(asm.R1, 0x45, ""), p.cold)
	g.hotHeader(l3)
	g.hot4(p)
	g.bind(six)
	g.op(asm.RSh.Imm(asm.R1, 4))
	g.jump(asm.JNE.Imm(asm.R1, 6, ""), p.cold)
	g.hotHeader(l3)
	if !g.wants6() {
		g.goTo(g.done)
		return
	}
	g.goTo(p.v6)
}

// wants6 says whether any rule asks for what IPv6 packets have.
func (g *gen) wants6() bool {
	return g.need&anyIP6 != 0 || g.need&anyL4 != 0 && !onlyIPv4(g.p.rules)
}

func (g *gen) hotHeader(l3 int32) {
	if l3 != 0 {
		g.found(noEth)
	}
	g.op(asm.Mov.Imm(asm.R9, l3), asm.StoreMem(asm.R8, imgL3, asm.R9, asm.Word))
}

// transportSize is how many bytes of transport headers are wanted.
func (g *gen) transportSize() (size int16) {
	for _, t := range transports {
		if g.wants(t) {
			size = max(size, int16(t.size))
		}
	}
	return size
}

// hot4 goes on with an IPv4 header without options, and 20 bytes behind it in the image, which it puts in their place.
func (g *gen) hot4(p *paths) {
	g.found(noIP4)
	if g.need&anyL4 == 0 {
		g.goTo(g.done)
		return
	}
	g.op(asm.Add.Imm(asm.R9, 20))
	g.end4()
	for i := int16(0); i < g.transportSize(); i += 4 {
		g.op(asm.LoadMem(asm.R1, asm.R8, imgIP+20+i, asm.Word), asm.StoreMem(asm.R8, imgL4+i, asm.R1, asm.Word))
	}
	g.launder(asm.R9, imgAt) // as on the other way: the verifier need not go through what both share twice
	g.clip()
	for _, t := range transports {
		if !g.wants(t) || t.bit == noICMP6 {
			continue
		}
		other := g.label()
		g.jump(asm.JNE.Imm(asm.R0, t.proto, ""), other)
		g.fits(t.size, g.done)
		g.goTo(p.have[t.bit])
		g.bind(other)
	}
	g.goTo(g.done)
}
