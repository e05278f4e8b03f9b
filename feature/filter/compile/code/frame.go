// SPDX-License-Identifier: Apache-2.0

package code

import "github.com/cilium/ebpf/asm"

// The verifier copies the state of the whole stack at every branch, down to the lowest used byte. The stack is
// therefore kept short. Stores without a later read are removed, and unused slots of 8 bytes are left out. Both are
// known only when the code is complete. The generator uses a fixed layout, compacted here.

// Copied marks the instructions of copying a word. They are needed only if one of their stores is.
type Copied uint8

const (
	CopyLoads  Copied = iota + 1 // the first load
	CopyShifts                   // shift for the next store
	CopyStores
)

// stackRange is a range of stack slots.
type stackRange struct{ from, to int }

// StackDyn is the offset of a dynptr from the frame pointer (netfilter).
const StackDyn = -16

// MaxSlots is the number of slots of a stack.
const MaxSlots = 512 / 8

// slots returns the slots of n bytes at an offset from the frame pointer. Slot 0 is the uppermost one, directly below
// the frame pointer.
func slots(off, n int) stackRange { return stackRange{(-off - n) / 8, (-off - 1) / 8} }

// Fill records n bytes at an offset from the frame pointer as written by a helper.
func (b *Builder) Fill(off int, n int) { b.filled = append(b.filled, slots(off, n)) }

// access is an instruction reading or writing the stack, or a pair loading a stack address to a register.
type access struct {
	at, off int  // offset from the frame pointer
	kind    kind // of access
	image   bool // through R8
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

// accesses returns the stack accesses of live instructions.
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

// slots returns the slots possibly used by an access. An address may belong to a dynptr, or to the rest of the
// scratch area. Slots of the image filled by helpers are in b.filled.
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

// shrink drops stores without a read and compacts the stack.
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
	needed := false // the following stores need the copy
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

// move removes unused slots. It keeps the order, so objects larger than a slot stay contiguous.
func (b *Builder) move(as []access, used *[MaxSlots]bool) {
	var up [MaxSlots + 1]int // number of bytes a slot moves up
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
