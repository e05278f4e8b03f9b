// SPDX-License-Identifier: Apache-2.0

package code

import "github.com/cilium/ebpf/asm"

// The verifier copies the state of the whole stack at every branch, down to the lowest byte that is used, so it is kept
// short: what a program stores and never reads is not stored, and the slots of 8 bytes that nothing is kept in are left out.
// Which they are shows when the code is there, so the generator has a place for everything, and this moves them together.

// Copied says that an instruction is one of those that copy a word, which are needed only if one of their stores is.
type Copied uint8

const (
	CopyLoads  Copied = iota + 1 // the first one
	CopyShifts                   // what the next store needs
	CopyStores
)

// stackRange is slots of the stack.
type stackRange struct{ from, to int }

// StackDyn is where a dynptr lies, from the frame pointer (netfilter).
const StackDyn = -16

// MaxSlots is how many slots a stack has.
const MaxSlots = 512 / 8

// slots are those of n bytes at an offset from the frame pointer; slot 0 is the uppermost, which ends there.
func slots(off, n int) stackRange { return stackRange{(-off - n) / 8, (-off - 1) / 8} }

// Fill notes that a helper writes n bytes at an offset from the frame pointer.
func (b *Builder) Fill(off int, n int) { b.filled = append(b.filled, slots(off, n)) }

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
func (b *Builder) accesses() []access {
	out := make([]access, 0, len(b.Ins)/2)
	for i := range b.Ins {
		x := &b.Ins[i]
		if x.Here != 0 || x.dead {
			continue
		}
		a := access{at: i, off: int(x.Offset)}
		base := x.Dst
		switch class := x.OpCode.Class(); {
		case class.IsLoad() && x.OpCode.Mode() == asm.MemMode:
			base = x.Src
		case class.IsStore():
			a.kind = stores
		case x.OpCode == opMov && i+1 < len(b.Ins) && b.Ins[i+1].Here == 0 && b.Ins[i+1].OpCode == opAdd && b.Ins[i+1].Dst == x.Dst:
			base, a.kind, a.off = x.Src, points, int(b.Ins[i+1].Constant)
		default:
			continue
		}
		if a.image = base == asm.R8; a.image {
			a.off += b.image
		} else if base != asm.RFP {
			continue
		}
		out = append(out, a)
	}
	return out
}

// slots are those that an access may use. At an address there may be a dynptr, or what there is of the scratch from there on;
// of the image helpers fill what is in filled.
func (b *Builder) slots(a access) stackRange {
	switch {
	case a.kind != points:
		return slots(a.off, 1)
	case a.image || b.Ins[a.at].Dst == asm.R8:
		return stackRange{0, -1}
	case a.off >= StackDyn:
		return slots(a.off, -StackDyn)
	}
	return slots(a.off, b.image-a.off)
}

func (h stackRange) mark(all *[MaxSlots]bool) {
	for s := h.from; s <= h.to; s++ {
		all[s] = true
	}
}

// shrink drops the stores that nothing reads, and moves what is left of the stack together.
func (b *Builder) shrink() {
	as := b.accesses()
	var read, used [MaxSlots]bool
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
			b.Ins[a.at].dead = true
		}
	}
	needed := false // of a copy, by what follows
	for i := len(b.Ins) - 1; i >= 0; i-- {
		x := &b.Ins[i]
		switch x.Part {
		case CopyStores:
			needed = needed || !x.dead
		case CopyShifts, CopyLoads:
			x.dead = x.dead || !needed
			needed = needed && x.Part == CopyShifts
		}
	}
	b.move(as, &used)
}

// move leaves out the slots in which nothing is. The order stays, so that what is larger than a slot stays in one piece.
func (b *Builder) move(as []access, used *[MaxSlots]bool) {
	var up [MaxSlots + 1]int // by how many bytes a slot moves
	for s := range used {
		up[s+1] = up[s]
		if !used[s] {
			up[s+1] += 8
		}
	}
	moved := func(off int) int { return off + up[slots(off, 1).from] }
	image := moved(b.image)
	for _, a := range as {
		off := moved(a.off)
		if a.image {
			off -= image
		}
		if a.kind == points {
			b.Ins[a.at+1].Constant = int64(off)
		} else {
			b.Ins[a.at].Offset = int16(off)
		}
	}
}
