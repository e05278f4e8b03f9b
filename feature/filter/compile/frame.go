// SPDX-License-Identifier: Apache-2.0

package compile

import "github.com/cilium/ebpf/asm"

// The verifier copies the state of the whole stack at every branch, down to the lowest byte that is used, so it is kept
// short: what a program stores and never reads is not stored, and the slots of 8 bytes that nothing is kept in are left out.
// Which they are shows when the code is there, so the generator has a place for everything, and this moves them together.

// copied says that an instruction is one of those that copy a word, which are needed only if one of their stores is.
type copied uint8

const (
	copyLoads  copied = iota + 1 // the first one
	copyShifts                   // what the next store needs
	copyStores
)

// held is slots of the stack.
type held struct{ from, to int }

// mostSlots is how many slots a stack has.
const mostSlots = 512 / 8

// slots are those of n bytes at an offset from the frame pointer; slot 0 is the uppermost, which ends there.
func slots(off, n int) held { return held{(-off - n) / 8, (-off - 1) / 8} }

// fill notes that a helper writes n bytes of the image.
func (b *builder) fill(off int32, n int32) {
	b.filled = append(b.filled, slots(stackImage+int(off), int(n)))
}

// access is an instruction that reads or writes the stack, or the two that put an address of it in a register.
type access struct {
	at, off int  // off from the frame pointer
	kind    kind // of access
	image   bool // by way of R8
}

type kind uint8

const (
	loads kind = iota
	stores
	points
)

var (
	opMov = asm.Mov.Reg(asm.R0, asm.R0).OpCode
	opAdd = asm.Add.Imm(asm.R0, 0).OpCode
)

// accesses are those of the instructions that are alive.
func (b *builder) accesses() []access {
	out := make([]access, 0, len(b.ins)/2)
	for i := range b.ins {
		x := &b.ins[i]
		if x.here != 0 || x.dead {
			continue
		}
		a := access{at: i, off: int(x.Offset)}
		base := x.Dst
		switch class := x.OpCode.Class(); {
		case class.IsLoad() && x.OpCode.Mode() == asm.MemMode:
			base = x.Src
		case class.IsStore():
			a.kind = stores
		case x.OpCode == opMov && i+1 < len(b.ins) && b.ins[i+1].here == 0 && b.ins[i+1].OpCode == opAdd && b.ins[i+1].Dst == x.Dst:
			base, a.kind, a.off = x.Src, points, int(b.ins[i+1].Constant)
		default:
			continue
		}
		if a.image = base == asm.R8; a.image {
			a.off += stackImage
		} else if base != asm.RFP {
			continue
		}
		out = append(out, a)
	}
	return out
}

// slots are those that an access may use. At an address there may be a dynptr, or what there is of the scratch from there on;
// of the image helpers fill what is in filled.
func (b *builder) slots(a access) held {
	switch {
	case a.kind != points:
		return slots(a.off, 1)
	case a.image || b.ins[a.at].Dst == asm.R8:
		return held{0, -1}
	case a.off >= stackDyn:
		return slots(a.off, -stackDyn)
	}
	return slots(a.off, stackImage-a.off)
}

func (h held) mark(all *[mostSlots]bool) {
	for s := h.from; s <= h.to; s++ {
		all[s] = true
	}
}

// shrink drops the stores that nothing reads, and moves what is left of the stack together.
func (b *builder) shrink() {
	as := b.accesses()
	var read, used [mostSlots]bool
	for _, a := range as {
		if a.kind != stores {
			b.slots(a).mark(&read)
		}
	}
	used = read
	for _, h := range b.filled {
		h.mark(&used)
	}
	for _, a := range as {
		if a.kind == stores && !read[b.slots(a).from] {
			b.ins[a.at].dead = true
		}
	}
	needed := false // of a copy, by what follows
	for i := len(b.ins) - 1; i >= 0; i-- {
		x := &b.ins[i]
		switch x.part {
		case copyStores:
			needed = needed || !x.dead
		case copyShifts, copyLoads:
			x.dead = x.dead || !needed
			needed = needed && x.part == copyShifts
		}
	}
	b.move(as, &used)
}

// move leaves out the slots in which nothing is. The order stays, so that what is larger than a slot stays in one piece.
func (b *builder) move(as []access, used *[mostSlots]bool) {
	var up [mostSlots + 1]int // by how many bytes a slot moves
	for s := range used {
		up[s+1] = up[s]
		if !used[s] {
			up[s+1] += 8
		}
	}
	moved := func(off int) int { return off + up[slots(off, 1).from] }
	image := moved(stackImage)
	for _, a := range as {
		off := moved(a.off)
		if a.image {
			off -= image
		}
		if a.kind == points {
			b.ins[a.at+1].Constant = int64(off)
		} else {
			b.ins[a.at].Offset = int16(off)
		}
	}
}
