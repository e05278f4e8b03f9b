// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"encoding/binary"

	"github.com/cilium/ebpf/asm"

	"github.com/weir-project/weir/feature/filter/compile/code"
	"github.com/weir-project/weir/feature/filter/expr"
)

var (
	be     = binary.BigEndian
	native = binary.NativeEndian
)

const (
	etherIPv4 = 0x0800
	etherIPv6 = 0x86dd
	etherVLAN = 0x8100
	etherQinQ = 0x88a8

	laterFragment = 0x1fff

	anyLink = noEth | noTag0 | noTag1
	anyIP6  = noIP6 | noHopOpts | noDstOpts | noRouting | noFrag
	anyL4   = noTCP | noPorts | noFlags | noUnreadable | noUDP | noICMP | noICMP6 | noGRE | noPayload
)

// found clears absence bits in R7.
func (g *gen) found(bits uint32) { g.Op(asm.And.Imm(asm.R7, int32(^bits))) }

// launder stores and reloads a 32-bit register, so the verifier forgets its value.
func (g *gen) launder(r asm.Register, at int16) {
	g.Op(asm.StoreMem(asm.R8, at, r, asm.Word), asm.LoadMem(r, asm.R8, at, asm.Word))
}

// ethernet loads the link-layer header and VLAN tags. It leaves the offset of the IP header in R9. Packets other than
// IPv4 and IPv6 are done.
func (g *gen) ethernet() {
	g.Note = "Ethernet"
	g.Op(asm.Mov.Imm(asm.R2, 0))
	g.loadImage(imgEth, 14)
	g.found(noEth)
	g.Op(asm.Mov.Imm(asm.R9, 14), asm.LoadMem(asm.R0, asm.R8, imgEth+12, asm.Half))
	inner, untagged := g.Label(), g.Label()
	if g.o.Hook == TC {
		outer := g.Label()
		g.Note = "the tag removed by the kernel"
		g.Op(asm.LoadMem(asm.R1, asm.R6, skbVlanPresent, asm.Word))
		g.Jump(asm.JEq.Imm(asm.R1, 0, ""), outer)
		g.Op(asm.LoadMem(asm.R1, asm.R6, skbVlanTCI, asm.Word), asm.HostTo(asm.BE, asm.R1, asm.Half), asm.StoreMem(asm.R8, imgTag0, asm.R1, asm.Half),
			asm.StoreMem(asm.R8, imgTag0+2, asm.R0, asm.Half),
			asm.LoadMem(asm.R1, asm.R6, skbVlanProto, asm.Word), asm.StoreMem(asm.R8, imgEth+12, asm.R1, asm.Half))
		g.found(noTag0)
		g.GoTo(inner)
		g.Bind(outer)
	}
	g.tag(imgTag0, noTag0, untagged)
	g.Bind(inner)
	g.tag(imgTag1, noTag1, untagged)
	g.moreTags(untagged)
	g.Bind(untagged)
	g.launder(asm.R9, imgL3)
}

// unlessTag jumps to untagged unless R0 is the EtherType of a VLAN tag.
func (g *gen) unlessTag(untagged code.Label) {
	// The product is 0 for either type.
	g.Op(asm.Mov.Reg(asm.R1, asm.R0), asm.Xor.Imm(asm.R1, int32(swapped(etherVLAN, asm.Half))),
		asm.Mov.Reg(asm.R2, asm.R0), asm.Xor.Imm(asm.R2, int32(swapped(etherQinQ, asm.Half))), asm.Mul.Reg(asm.R1, asm.R2))
	g.Jump(asm.JNE.Imm(asm.R1, 0, ""), untagged)
}

// moreTags walks the tags after the second one, from R9. No field has their values.
func (g *gen) moreTags(untagged code.Label) {
	g.unlessTag(untagged)
	g.Note = "a third VLAN tag"
	last, cut := g.Label(), g.Label()
	g.Op(asm.StoreMem(asm.R8, imgAbsent, asm.R7, asm.Word), asm.StoreMem(asm.R8, imgAt, asm.R9, asm.Word))
	g.repeat(expr.MaxTags, func() {
		g.Op(asm.LoadMem(asm.R9, asm.R8, imgAt, asm.Word), asm.Mov.Reg(asm.R2, asm.R9))
		g.load(func(r asm.Register) []asm.Instruction { return stack(r, int32(g.scratchOff)) }, 4, cut, true)
		g.Op(asm.LoadMem(asm.R9, asm.R8, imgAt, asm.Word), asm.Add.Imm(asm.R9, 4), asm.StoreMem(asm.R8, imgAt, asm.R9, asm.Word),
			asm.LoadMem(asm.R0, asm.RFP, g.scratchOff+2, asm.Half))
		g.unlessTag(last)
	})
	g.Op(asm.LoadMem(asm.R7, asm.R8, imgAbsent, asm.Word))
	g.GoTo(g.entry(expr.HaveLink))
	g.Bind(cut)
	g.Op(asm.LoadMem(asm.R7, asm.R8, imgAbsent, asm.Word))
	g.GoTo(g.done)
	g.Bind(last)
	g.Op(asm.LoadMem(asm.R7, asm.R8, imgAbsent, asm.Word))
	g.GoTo(untagged)
}

// tag loads a VLAN tag at R9 if R0 is the type of a tag. R0 is then the type after the tag.
func (g *gen) tag(img int32, bit uint32, untagged code.Label) {
	g.unlessTag(untagged)
	g.Op(asm.Mov.Reg(asm.R2, asm.R9))
	g.loadImage(img, 4)
	if g.o.Hook == XDP && img == imgTag0 { // see copy: rewrite the bytes after the tag
		g.Op(asm.LoadMem(asm.R1, asm.R8, imgLen, asm.Word), asm.StoreMem(asm.R8, imgLen, asm.R1, asm.Word))
	}
	g.found(bit)
	g.Op(asm.Add.Imm(asm.R9, 4), asm.LoadMem(asm.R0, asm.R8, int16(img)+2, asm.Half))
}

// loadImage loads n bytes at R2 to the image. If they are missing, all later headers are absent too.
func (g *gen) loadImage(img int32, n int32) {
	dst := func(r asm.Register) []asm.Instruction { return image(r, img) }
	if g.scratchAt() != 0 { // the IP header is linear before netfilter and sockets get a packet
		g.direct(n, g.done)
		g.copy(dst, n)
		return
	}
	// At TC this path is rare unless rules use tags, and code for direct access is long.
	g.load(dst, n, g.done, !g.inPlace() || g.o.Hook == TC && g.need&anyLink == 0)
}

// internet loads the IP header at R9.
func (g *gen) internet(p *paths) {
	v4, v6, l4 := g.Label(), g.Label(), g.Label()
	want6 := g.wants6()
	g.Note = "the IP header"
	if g.o.Start == Ethernet {
		g.Op(asm.StoreMem(asm.R8, imgSpare, asm.R0, asm.Half))
	} else {
		g.Op(asm.Mov.Imm(asm.R9, 0), asm.StoreMem(asm.R8, imgL3, asm.R9, asm.Word))
	}
	g.Op(asm.Mov.Reg(asm.R2, asm.R9))
	g.loadImage(imgIP, 20)
	g.Op(asm.LoadMem(asm.R0, asm.R8, imgIP, asm.Byte), asm.Mov.Reg(asm.R1, asm.R0), asm.RSh.Imm(asm.R1, 4))
	type4, type6 := int32(4), int32(6)
	if g.o.Start == Ethernet { // the type and the version field must agree
		type4, type6 = typeAnd(etherIPv4, 4, 4), typeAnd(etherIPv6, 6, 4)
		g.Op(asm.LoadMem(asm.R2, asm.R8, imgSpare, asm.Half), asm.LSh.Imm(asm.R2, 4), asm.Or.Reg(asm.R1, asm.R2))
	}
	if want6 {
		g.Jump(asm.JEq.Imm(asm.R1, type6, ""), v6)
	}
	g.Jump(asm.JNE.Imm(asm.R1, type4, ""), g.done)
	g.Bind(v4)
	g.ipv4(l4)
	if want6 {
		g.Bind(v6)
		g.Op(asm.Mov.Reg(asm.R2, asm.R9), asm.Add.Imm(asm.R2, 20))
		g.loadImage(imgIP+20, 20)
		g.Bind(p.v6)
		g.ipv6(l4)
	}
	g.Bind(l4)
	if g.need&anyL4 != 0 {
		g.transport(p)
	}
}

// setEnd stores the end of the IP packet: the length in R1 plus base, counted from the packet's start. The hook's
// bytes may end earlier and then limit it. A length of 0 is unknown. At hooks starting at the transport header, clip
// applies the hook's limit later.
func (g *gen) setEnd(base int32) {
	if g.o.Start == Transport {
		g.Op(asm.Mov.Imm32(asm.R2, -1))
	} else {
		g.Op(asm.LoadMem(asm.R2, asm.R8, imgLen, asm.Word))
	}
	// No branches, because the verifier would follow them: a length of 0 becomes 2 GiB.
	g.Op(asm.Mov.Reg(asm.R3, asm.R1), asm.Sub.Imm(asm.R3, 1), asm.RSh.Imm(asm.R3, 33), asm.Or.Reg(asm.R1, asm.R3),
		asm.LoadMem(asm.R3, asm.R8, imgL3, asm.Word), asm.Add.Reg(asm.R1, asm.R3))
	if base != 0 {
		g.Op(asm.Add.Imm(asm.R1, base))
	}
	g.least(asm.R2, asm.R1)
	g.Op(asm.StoreMem(asm.R8, imgEnd, asm.R2, asm.Word))
}

// least sets r to the minimum of r and other without a branch: it adds the difference if negative. It clobbers other
// and R3.
func (g *gen) least(r, other asm.Register) {
	g.Op(asm.Sub.Reg(other, r), asm.Mov.Reg(asm.R3, other), asm.ArSh.Imm(asm.R3, 63), asm.And.Reg(other, asm.R3), asm.Add.Reg(r, other))
}

// typeAnd returns an EtherType as stored in memory, shifted left by bits and combined with low.
func typeAnd(ether uint32, low int32, bits int) int32 {
	return int32(swapped(ether, asm.Half))<<bits | low
}

// ipv4 continues with the first header byte in R0. It jumps to l4 with the protocol in R0 and the offset in R9.
func (g *gen) ipv4(l4 code.Label) {
	g.Note = "IPv4"
	g.Op(asm.And.Imm(asm.R0, 15))
	g.Jump(asm.JLT.Imm(asm.R0, 5, ""), g.done)
	g.found(noIP4)
	if g.need&anyL4 == 0 {
		g.GoTo(g.done)
		return
	}
	g.Op(asm.LSh.Imm(asm.R0, 2), asm.Add.Reg(asm.R9, asm.R0))
	g.end4()
	if g.o.Start != Transport { // the kernel has removed an AH before a socket gets the packet
		g.Jump(asm.JNE.Imm(asm.R0, nextAH, ""), l4)
		g.authentication()
	}
	g.GoTo(l4)
}

// authentication skips an AH at R9 (RFC 4302) and sets R0 to the next protocol. A second AH makes the header
// unreadable.
func (g *gen) authentication() {
	g.Note = "an authentication header"
	g.fits(8, g.entry(0))
	g.Op(asm.Mov.Reg(asm.R2, asm.R9))
	g.loadRare(imgL4, 8, g.entry(0))
	g.Op(asm.LoadMem(asm.R0, asm.R8, imgL4, asm.Byte), asm.LoadMem(asm.R1, asm.R8, imgL4+1, asm.Byte))
	g.Jump(asm.JEq.Imm(asm.R0, nextAH, ""), g.entry(0))
	g.Op(asm.LSh.Imm(asm.R1, 2), asm.Add.Reg(asm.R9, asm.R1), asm.Add.Imm(asm.R9, 8))
}

// end4 sets the end of an IPv4 packet and R0 to the protocol at R9. Later fragments are done.
func (g *gen) end4() {
	g.Op(asm.LoadMem(asm.R1, asm.R8, imgIP+2, asm.Half), asm.HostTo(asm.BE, asm.R1, asm.Half))
	g.setEnd(0)
	g.Op(asm.LoadMem(asm.R0, asm.R8, imgIP+6, asm.Half))
	g.Note = "a later fragment has no transport header"
	g.Jump(asm.JSet.Imm(asm.R0, int32(swapped(laterFragment, asm.Half)), ""), g.done)
	g.Op(asm.LoadMem(asm.R0, asm.R8, imgIP+9, asm.Byte))
}

// The walked IPv6 extension headers, and protocols.
const (
	nextHopOpts  = 0
	nextRouting  = 43
	nextFragment = 44
	nextAH       = 51
	nextDstOpts  = 60

	protoICMP  = 1
	protoTCP   = 6
	protoUDP   = 17
	protoGRE   = 47
	protoICMP6 = 58
)

// ipv6 processes the header in the image, at offset R9, and walks the extension headers.
func (g *gen) ipv6(l4 code.Label) {
	g.Note = "IPv6"
	g.found(noIP6)
	if g.need&(anyL4|anyIP6&^noIP6) == 0 {
		g.GoTo(g.done)
		return
	}
	g.Op(asm.LoadMem(asm.R1, asm.R8, imgIP+4, asm.Half), asm.HostTo(asm.BE, asm.R1, asm.Half))
	g.setEnd(40)
	g.Op(asm.Add.Imm(asm.R9, 40), asm.LoadMem(asm.R0, asm.R8, imgIP+6, asm.Byte))
	// Most packets have no extension header.
	ext, noExt, out, broken := g.Label(), g.Label(), g.Label(), g.Label()
	isExtension(g, ext)
	g.GoTo(noExt)
	g.Bind(ext)
	g.Op(asm.StoreMem(asm.R8, imgAbsent, asm.R7, asm.Word), asm.StoreMem(asm.R8, imgAt, asm.R9, asm.Word),
		asm.StoreMem(asm.R8, imgSpare, asm.R0, asm.Word))
	g.open(broken)
	g.extensions(out, broken, noExt)
	g.Bind(broken)
	g.Note = "the chain of extension headers is cut, or too long"
	g.Op(asm.LoadMem(asm.R7, asm.R8, imgAbsent, asm.Word))
	g.GoTo(g.entry(0))
	g.Bind(out)
	g.Note = "the extension headers end"
	g.Op(asm.LoadMem(asm.R7, asm.R8, imgAbsent, asm.Word))
	g.GoTo(g.done)
	g.Bind(noExt)
	g.GoTo(l4)
}

// fits jumps to fail if n bytes at R9 exceed the packet's end.
func (g *gen) fits(n int32, fail code.Label) {
	g.Op(asm.Mov.Reg(asm.R2, asm.R9))
	if n != 0 {
		g.Op(asm.Add.Imm(asm.R2, n))
	}
	g.Op(asm.LoadMem(asm.R3, asm.R8, imgEnd, asm.Word))
	g.Jump(asm.JGT.Reg(asm.R2, asm.R3, ""), fail)
}

// repeat generates a loop of at most n turns. A turn leaves by a jump or continues with the next one. The absence
// bits are in the image meanwhile.
func (g *gen) repeat(n int32, turn func()) {
	loop, end := g.Label(), g.Label()
	counter := asm.R7 // tracked by the verifier, which verifies every turn
	if g.o.Kernel.MayGoto {
		counter = asm.R1
		g.zero(imgTurn, counter)
		g.Bind(loop)
		g.Jump(code.MayGoto(0), end)
		turn()
		g.Op(asm.LoadMem(counter, asm.R8, imgTurn, asm.Word), asm.Add.Imm(counter, 1), asm.StoreMem(asm.R8, imgTurn, counter, asm.Word))
	} else {
		g.Op(asm.Mov.Imm(counter, 0))
		g.Bind(loop)
		turn()
		g.Op(asm.Add.Imm(counter, 1))
	}
	g.Jump(asm.JLT.Imm(counter, n, ""), loop)
	g.Bind(end)
}

// zero stores a zero of unknown value to the verifier, computed in register r.
func (g *gen) zero(at int16, r asm.Register) {
	g.Op(asm.LoadMem(r, asm.R8, imgLen, asm.Word), asm.Xor.Reg(r, r), asm.StoreMem(asm.R8, at, r, asm.Word))
}

func (g *gen) foundInImage(bits uint32) {
	g.Op(asm.LoadMem(asm.R2, asm.R8, imgAbsent, asm.Word), asm.And.Imm(asm.R2, int32(^bits)), asm.StoreMem(asm.R8, imgAbsent, asm.R2, asm.Word))
}
