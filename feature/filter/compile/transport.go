// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"github.com/cilium/ebpf/asm"

	"github.com/weir-project/weir/feature/filter/compile/code"
	"github.com/weir-project/weir/feature/filter/expr"
)

// transports are the dissected protocols, most frequent first.
var transports = []transport{{protoUDP, noUDP, 8}, {protoTCP, noTCP, 20}, {protoICMP, noICMP, 8}, {protoICMP6, noICMP6, 8}, {protoGRE, noGRE, 4}}

// commonSize is the size of the most frequent headers, in bytes.
const commonSize = 8

type transport struct {
	proto int32
	bit   uint32
	size  int32 // of the header without options
}

// wants reports whether a rule uses the protocol or its payload.
func (g *gen) wants(t transport) bool {
	return g.need&t.bit != 0 || g.need&noPayload != 0 && t.bit != noGRE
}

// clip limits the packet's end to the bytes visible to the hook. At hooks starting at the transport header these
// begin at R9.
func (g *gen) clip() {
	if g.o.Start != Transport {
		return
	}
	g.Op(asm.LoadMem(asm.R1, asm.R8, imgLen, asm.Word), asm.Add.Reg(asm.R1, asm.R9), asm.LoadMem(asm.R2, asm.R8, imgEnd, asm.Word))
	g.least(asm.R2, asm.R1)
	g.Op(asm.StoreMem(asm.R8, imgEnd, asm.R2, asm.Word))
}

// transport loads the header of the protocol in R0, at offset R9. It checks afterwards whether the header fits.
func (g *gen) transport(p *paths) {
	g.Note = "the transport header"
	g.launder(asm.R9, imgAt)
	g.clip()
	g.Op(asm.StoreMem(asm.R8, imgSpare, asm.R0, asm.Word))
	loaded, unloaded, small, short, gre := g.Label(), g.Label(), g.Label(), g.Label(), g.Label()
	for _, t := range transports {
		if g.wants(t) && t.size > commonSize {
			other := g.Label()
			g.Jump(asm.JNE.Imm(asm.R0, t.proto, ""), other)
			g.Op(asm.Mov.Reg(asm.R2, asm.R9))
			g.loadHeader(imgL4, t.size, short)
			g.GoTo(loaded)
			g.Bind(other)
		}
	}
	g.Op(asm.Mov.Reg(asm.R2, asm.R9))
	g.loadHeader(imgL4, commonSize, unloaded)
	g.Bind(loaded)
	g.Op(asm.LoadMem(asm.R0, asm.R8, imgSpare, asm.Word))
	g.Bind(p.l4)
	g.fits(commonSize, small)
	for _, t := range transports {
		if !g.wants(t) {
			continue
		}
		other := g.Label()
		g.Jump(asm.JNE.Imm(asm.R0, t.proto, ""), other)
		if t.size > commonSize {
			g.fits(t.size, short)
		}
		if t.bit == noICMP || t.bit == noICMP6 { // each belongs to one IP version
			g.ofFamily(t, g.done)
		}
		if t.bit == noTCP {
			g.found(noTCP | noPorts | noFlags)
		} else {
			g.found(t.bit)
		}
		if t.bit == noGRE {
			g.Bind(gre)
			g.found(noGRE)
		}
		g.findPayload(t)
		g.GoTo(g.done)
		g.Bind(other)
	}
	g.GoTo(g.done)
	g.partOfTCP(short)
	g.Bind(unloaded)
	g.Op(asm.LoadMem(asm.R0, asm.R8, imgSpare, asm.Word))
	g.Bind(small)
	g.smallHeader(gre)
}

// partOfTCP handles a TCP header shorter than 20 bytes, or not fully loadable.
func (g *gen) partOfTCP(short code.Label) {
	if !g.wants(transport{bit: noTCP}) {
		return
	}
	g.Bind(short)
	g.Note = "a part of a TCP header"
	eight := g.Label()
	g.fits(16, eight)
	g.Op(asm.Mov.Reg(asm.R2, asm.R9))
	g.loadRare(imgL4, 16, eight)
	g.found(noPorts | noFlags | noShort20)
	g.GoTo(g.entry(16))
	g.Bind(eight)
	g.fits(8, g.entry(0))
	g.Op(asm.Mov.Reg(asm.R2, asm.R9))
	g.loadRare(imgL4, 8, g.entry(0))
	g.found(noPorts | noShort16 | noShort20)
	g.GoTo(g.entry(8))
}

// smallHeader handles less than 8 bytes of the protocol in R0: a complete header for GRE, unreadable for others.
func (g *gen) smallHeader(gre code.Label) {
	g.Note = "less than 8 bytes of a transport header"
	other := g.Label()
	g.Jump(asm.JNE.Imm(asm.R0, protoGRE, ""), other)
	g.fits(4, g.entry(0))
	if g.wants(transport{bit: noGRE}) {
		g.Op(asm.Mov.Reg(asm.R2, asm.R9))
		g.loadRare(imgL4, 4, g.entry(0))
		g.GoTo(gre)
	} else {
		g.GoTo(g.done)
	}
	g.Bind(other)
	g.Jump(asm.JGT.Imm(asm.R0, 63, ""), g.done)
	// A bit mask of protocols. ICMP belongs to IPv4 and ICMPv6 to IPv6; one bit of the version field tells them
	// apart.
	g.Op(asm.LoadMem(asm.R2, asm.R8, imgIP, asm.Byte), asm.RSh.Imm(asm.R2, 5), asm.And.Imm(asm.R2, 1), asm.Mul.Imm(asm.R2, protoICMP6-protoICMP),
		asm.Mov.Imm(asm.R1, 1<<protoICMP), asm.LSh.Reg(asm.R1, asm.R2), asm.Or.Imm(asm.R1, 1<<protoTCP|1<<protoUDP),
		asm.RSh.Reg(asm.R1, asm.R0), asm.And.Imm(asm.R1, 1))
	g.Jump(asm.JNE.Imm(asm.R1, 0, ""), g.entry(0))
	g.GoTo(g.done)
}

// loadRare is loadHeader for rare packets. Outside XDP it uses a helper, with fewer instructions.
func (g *gen) loadRare(img, n int32, fail code.Label) {
	dst := func(r asm.Register) []asm.Instruction { return image(r, img) }
	if g.o.Hook == XDP {
		g.load(dst, n, fail, false)
		return
	}
	g.helpLate(dst, n, fail)
}

// ofFamily jumps to other unless the packet has the IP version of the protocol.
func (g *gen) ofFamily(t transport, other code.Label) {
	version := map[uint32]int32{noICMP: 4, noICMP6: 6}[t.bit]
	g.Op(asm.LoadMem(asm.R1, asm.R8, imgIP, asm.Byte), asm.RSh.Imm(asm.R1, 4))
	g.Jump(asm.JNE.Imm(asm.R1, version, ""), other)
}

// findPayload processes the header in the image.
func (g *gen) findPayload(t transport) {
	switch t.bit {
	case noUDP:
		g.udp()
	case noTCP:
		g.tcp()
	case noGRE:
		g.gre()
	default:
		g.payload(8)
	}
}

// loadHeader is loadImage for a found transport header.
func (g *gen) loadHeader(img, n int32, fail code.Label) {
	g.load(func(r asm.Register) []asm.Instruction { return image(r, img) }, n, fail, false)
}

// payload records the start of the payload, n bytes after R9.
func (g *gen) payload(n int32) {
	if g.need&noPayload == 0 {
		return
	}
	if n != 0 {
		g.Op(asm.Add.Imm(asm.R9, n))
	}
	g.Op(asm.StoreMem(asm.R8, imgBody, asm.R9, asm.Word))
	g.found(noPayload)
}

func (g *gen) udp() {
	g.payload(8)
	g.datagramEnd()
	if g.need&noQuestion != 0 {
		g.dns()
	}
}

// datagramEnd limits the packet's end to the length in the UDP header, because sockets receive no more and bytes
// after it would count as payload. R9 is the payload's offset. A length below the header's size wraps to 4 GiB and
// has no effect.
func (g *gen) datagramEnd() {
	if g.need&noPayload == 0 {
		return
	}
	g.Op(asm.LoadMem(asm.R1, asm.R8, imgL4+4, asm.Half), asm.HostTo(asm.BE, asm.R1, asm.Half), asm.Sub.Imm32(asm.R1, commonSize),
		asm.Add.Reg(asm.R1, asm.R9), asm.LoadMem(asm.R2, asm.R8, imgEnd, asm.Word))
	g.least(asm.R2, asm.R1)
	g.Op(asm.StoreMem(asm.R8, imgEnd, asm.R2, asm.Word))
}

// tcp continues at the end of the header, as given by its own length.
func (g *gen) tcp() {
	options := g.need&(noMSS|noWScale|noSackPerm|noTimestamps) != 0
	if g.need&(noPayload|noUnreadable) == 0 && !options {
		return
	}
	g.Op(asm.LoadMem(asm.R0, asm.R8, imgL4+12, asm.Byte), asm.RSh.Imm(asm.R0, 4), asm.LSh.Imm(asm.R0, 2))
	if options {
		g.Op(asm.Mov.Reg(asm.R1, asm.R9), asm.Add.Imm(asm.R1, 20), asm.StoreMem(asm.R8, imgSpare, asm.R1, asm.Word))
	}
	// The header has at least 20 bytes and ends within the packet if neither difference is negative.
	g.Op(asm.Add.Reg(asm.R9, asm.R0), asm.Sub.Imm(asm.R0, 20),
		asm.LoadMem(asm.R1, asm.R8, imgEnd, asm.Word), asm.Sub.Reg(asm.R1, asm.R9), asm.Or.Reg(asm.R1, asm.R0))
	g.Jump(asm.JSLT.Imm(asm.R1, 0, ""), g.entry(20))
	g.payload(0)
	if options {
		g.options()
	}
}

// options walks the TCP options from the offset in imgSpare to R9. It stores results in the image, absence bits
// included: the verifier must not distinguish packets by their options.
func (g *gen) options() {
	out := g.Label()
	g.Op(asm.StoreMem(asm.R8, imgAbsent, asm.R7, asm.Word), asm.StoreMem(asm.R8, imgAt2, asm.R9, asm.Word))
	g.repeat(expr.MaxOptions, func() { g.option(out) })
	g.Bind(out)
	g.Op(asm.LoadMem(asm.R7, asm.R8, imgAbsent, asm.Word))
}

// option processes one option: it loads kind and length, and the needed bytes of a known option.
func (g *gen) option(out code.Label) {
	next, two, skip := g.Label(), g.Label(), g.Label()
	g.Note = "a TCP option"
	g.Op(asm.LoadMem(asm.R9, asm.R8, imgSpare, asm.Word), asm.LoadMem(asm.R3, asm.R8, imgAt2, asm.Word))
	g.Jump(asm.JGE.Reg(asm.R9, asm.R3, ""), out)
	g.scratch(0, 1, out)
	g.Op(asm.LoadMem(asm.R0, asm.RFP, g.scratchOff, asm.Byte), asm.Mov.Imm(asm.R1, 1))
	g.Jump(asm.JEq.Imm(asm.R0, 0, ""), out)
	g.Jump(asm.JNE.Imm(asm.R0, 1, ""), two)
	g.GoTo(next)
	g.Bind(two)
	g.Op(asm.Mov.Reg(asm.R2, asm.R9), asm.Add.Imm(asm.R2, 2), asm.LoadMem(asm.R3, asm.R8, imgAt2, asm.Word))
	g.Jump(asm.JGT.Reg(asm.R2, asm.R3, ""), out)
	g.scratch(0, 2, out)
	g.Op(asm.LoadMem(asm.R1, asm.RFP, g.scratchOff+1, asm.Byte))
	g.Jump(asm.JLT.Imm(asm.R1, 2, ""), out)
	g.Op(asm.Mov.Reg(asm.R2, asm.R9), asm.Add.Reg(asm.R2, asm.R1), asm.LoadMem(asm.R3, asm.R8, imgAt2, asm.Word))
	g.Jump(asm.JGT.Reg(asm.R2, asm.R3, ""), out)
	for _, o := range []struct {
		bit        uint32
		kind, size int32
		img        int32
	}{{noMSS, 2, 4, imgMSS}, {noWScale, 3, 3, imgWScale}, {noSackPerm, 4, 2, 0}, {noTimestamps, 8, 10, imgTS}} {
		if g.need&o.bit == 0 {
			continue
		}
		other := g.Label()
		g.Op(asm.LoadMem(asm.R0, asm.RFP, g.scratchOff, asm.Half))
		g.Jump(asm.JNE.Imm(asm.R0, int32(swapped(uint32(o.kind<<8|o.size), asm.Half)), ""), other)
		if o.img != 0 {
			g.Op(asm.Mov.Reg(asm.R2, asm.R9), asm.Add.Imm(asm.R2, 2))
			g.load(func(r asm.Register) []asm.Instruction { return image(r, o.img) }, o.size-2, out, false)
		}
		g.foundInImage(o.bit)
		g.GoTo(skip)
		g.Bind(other)
	}
	g.Bind(skip)
	g.Op(asm.LoadMem(asm.R1, asm.RFP, g.scratchOff+1, asm.Byte))
	g.Bind(next)
	g.Op(asm.Add.Reg(asm.R9, asm.R1), asm.StoreMem(asm.R8, imgSpare, asm.R9, asm.Word))
}

// scratch loads n bytes at R9+off to the scratch area.
func (g *gen) scratch(off, n int32, fail code.Label) {
	g.Op(asm.Mov.Reg(asm.R2, asm.R9))
	if off != 0 {
		g.Op(asm.Add.Imm(asm.R2, off))
	}
	g.load(func(r asm.Register) []asm.Instruction { return stack(r, int32(g.scratchOff)) }, n, fail, false)
}

// gre loads the key, stored after an optional checksum (RFC 2890).
func (g *gen) gre() {
	if g.need&noGREKey == 0 {
		return
	}
	plain := g.Label()
	g.Op(asm.LoadMem(asm.R0, asm.R8, imgL4, asm.Byte), asm.Mov.Reg(asm.R1, asm.R0), asm.And.Imm(asm.R1, 0x20))
	g.Jump(asm.JEq.Imm(asm.R1, 0, ""), g.done)
	g.Op(asm.Add.Imm(asm.R9, 4), asm.And.Imm(asm.R0, 0x80))
	g.Jump(asm.JEq.Imm(asm.R0, 0, ""), plain)
	g.Op(asm.Add.Imm(asm.R9, 4))
	g.Bind(plain)
	g.fits(4, g.done)
	g.Op(asm.Mov.Reg(asm.R2, asm.R9))
	g.loadHeader(imgKey, 4, g.done)
	g.found(noGREKey)
}

// dns detects a question and loads its type, stored after the name. R9 is the payload's offset.
func (g *gen) dns() {
	g.Note = "DNS"
	g.fits(12, g.done)
	g.scratch(4, 2, g.done)
	g.Op(asm.LoadMem(asm.R0, asm.RFP, g.scratchOff, asm.Half))
	g.Jump(asm.JEq.Imm(asm.R0, 0, ""), g.done)
	if g.need&noQType == 0 {
		// Names are compared with valid names, so the validity of this one is irrelevant.
		g.found(noQuestion)
		return
	}
	// A name ends at its maximum length, or at the packet's end.
	g.Op(asm.Add.Imm(asm.R9, 12), asm.StoreMem(asm.R8, imgSpare, asm.R9, asm.Word), asm.StoreMem(asm.R8, imgAbsent, asm.R7, asm.Word),
		asm.Mov.Reg(asm.R1, asm.R9), asm.Add.Imm(asm.R1, expr.MaxName), asm.LoadMem(asm.R2, asm.R8, imgEnd, asm.Word))
	g.least(asm.R2, asm.R1)
	g.Op(asm.StoreMem(asm.R8, imgAt2, asm.R2, asm.Word))
	name, wrong := g.Label(), g.Label()
	g.repeat(expr.MaxLabels+1, func() {
		g.Op(asm.LoadMem(asm.R9, asm.R8, imgSpare, asm.Word), asm.LoadMem(asm.R3, asm.R8, imgAt2, asm.Word))
		g.Jump(asm.JGE.Reg(asm.R9, asm.R3, ""), wrong)
		g.scratch(0, 1, wrong)
		g.Op(asm.LoadMem(asm.R0, asm.RFP, g.scratchOff, asm.Byte))
		g.Jump(asm.JEq.Imm(asm.R0, 0, ""), name)
		g.Jump(asm.JGT.Imm(asm.R0, 63, ""), wrong)
		g.Op(asm.Add.Imm(asm.R9, 1), asm.Add.Reg(asm.R9, asm.R0), asm.StoreMem(asm.R8, imgSpare, asm.R9, asm.Word))
	})
	g.Bind(wrong)
	g.Op(asm.LoadMem(asm.R7, asm.R8, imgAbsent, asm.Word))
	g.GoTo(g.done)
	g.Bind(name)
	g.Op(asm.LoadMem(asm.R7, asm.R8, imgAbsent, asm.Word))
	g.found(noQuestion)
	g.Op(asm.Add.Imm(asm.R9, 1))
	g.fits(2, g.done)
	g.Op(asm.Mov.Reg(asm.R2, asm.R9))
	g.loadHeader(imgQType, 2, g.done)
	g.found(noQType)
}
