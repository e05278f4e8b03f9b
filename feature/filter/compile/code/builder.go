// SPDX-License-Identifier: Apache-2.0

// Package code builds the instructions of a program. It resolves labels and jumps, compacts the stack, and encodes
// instructions unsupported by cilium/ebpf. It is independent of filters.
package code

import (
	"errors"
	"fmt"
	"math"

	"github.com/cilium/ebpf/asm"
)

// ErrTooLarge reports more rules than fit a program.
var ErrTooLarge = errors.New("too many rules for one program")

// License is the licence of loaded programs.
const License = "Dual BSD/GPL"

// Label is a position in the code; 0 is none.
type Label int32

// Insn is an instruction or the position of a label.
type Insn struct {
	asm.Instruction
	To   Label // jump target
	Here Label // label at this position, instead of an instruction
	dead bool
	keep bool   // a relay of a long jump: other jumps must not bypass it
	Part Copied // part of copying a word
}

// Builder collects the instructions of one function. Finish resolves the jumps. It also removes jumps to the next
// instruction, and unreachable instructions, because the verifier rejects them.
type Builder struct {
	Ins    []Insn
	labels Label
	Noted  bool           // keep notes
	Note   string         // for the next instruction
	Notes  map[int]string // by instruction
	filled []stackRange   // written by helpers
	image  int            // start of the packet's image, from the frame pointer
}

// Label creates a label, to be placed by Bind.
func (b *Builder) Label() Label {
	b.labels++
	return b.labels
}

// Bind places a label before the next instruction.
func (b *Builder) Bind(l Label) { b.Ins = append(b.Ins, Insn{Here: l}) }

// Op adds instructions.
func (b *Builder) Op(ins ...asm.Instruction) {
	b.keepNote()
	for _, i := range ins {
		b.Ins = append(b.Ins, Insn{Instruction: i})
	}
}

// Jump adds a conditional jump. i is an asm jump without a label.
func (b *Builder) Jump(i asm.Instruction, to Label) {
	b.keepNote()
	b.Ins = append(b.Ins, Insn{Instruction: i, To: to})
}

// keepNote assigns the pending note to the next instruction.
func (b *Builder) keepNote() {
	if b.Noted && b.Note != "" {
		if b.Notes == nil {
			b.Notes = map[int]string{}
		}
		b.Notes[len(b.Ins)] = b.Note
	}
	b.Note = ""
}

// GoTo adds a jump.
func (b *Builder) GoTo(to Label) { b.Jump(asm.Ja.Label(""), to) }

// MaxBetween is the maximum number of instructions between two relays. A jump reaches 32,767, and a rule with a set
// of some thousand members may be in between.
const MaxBetween = 6_000

// Relay adds a jump to a label within reach of earlier jumps. It returns the label for later jumps.
func (b *Builder) Relay(to Label) Label {
	over, next := b.Label(), b.Label()
	b.GoTo(over)
	b.Bind(to)
	b.GoTo(next)
	b.Ins[len(b.Ins)-1].keep = true
	b.Bind(over)
	return next
}

var (
	opJa   = asm.Ja.Label("").OpCode
	opExit = asm.Return().OpCode

	opMayGoto = MayGoto(0).OpCode
)

// IsJa reports whether the instruction is an unconditional jump to a label.
func (i *Insn) IsJa() bool { return i.To != 0 && i.OpCode == opJa }

func (i *Insn) ends() bool { return i.IsJa() || i.To == 0 && i.OpCode == opExit }

// labelIndexes returns, by label, the index of the next live instruction.
func (b *Builder) labelIndexes() []int {
	at := make([]int, b.labels+1)
	next := len(b.Ins)
	for i := len(b.Ins) - 1; i >= 0; i-- {
		switch x := &b.Ins[i]; {
		case x.Here != 0:
			at[x.Here] = next
		case !x.dead:
			next = i
		}
	}
	return at
}

// Note describes the instructions from At on. Notes are not kept as instruction comments: these would go to the
// kernel as line info and take longer to load than the program.
type Note struct {
	At   int
	Text string
}

// Finish resolves the jumps and compacts the stack. image is the offset of the packet's image, pointed to by R8, from
// the frame pointer. It returns [ErrFar] if a jump is too long.
func (b *Builder) Finish(image int) (out asm.Instructions, notes []Note, err error) {
	b.image = image
	for b.thread() {
	}
	b.shrink()
	at := b.labelIndexes()
	offset, n := make([]int, len(b.Ins)+1), 0
	for i := range b.Ins {
		offset[i] = n
		if x := &b.Ins[i]; x.Here == 0 && !x.dead {
			n += int(x.Width())
		}
	}
	offset[len(b.Ins)] = n
	out = make(asm.Instructions, 0, n)
	for i := range b.Ins {
		x := &b.Ins[i]
		if x.Here != 0 || x.dead {
			continue
		}
		if x.To != 0 {
			far := offset[at[x.To]] - offset[i] - 1
			if far > math.MaxInt16 || far < math.MinInt16 {
				return nil, nil, ErrFar
			}
			x.Offset = int16(far)
			x.Metadata = asm.Metadata{} // asm stores the jump target there
		}
		if text := b.Notes[i]; text != "" {
			notes = append(notes, Note{len(out), text})
		}
		out = append(out, x.Instruction)
	}
	return out, notes, nil
}

// thread redirects jumps to jumps to their final targets. It drops unreachable instructions and jumps without effect.
// It reports whether anything changed.
func (b *Builder) thread() (changed bool) {
	at := b.labelIndexes()
	for i := range b.Ins {
		x := &b.Ins[i]
		if x.To == 0 || x.dead {
			continue
		}
		for range 64 { // bounded, because a loop of jumps would not end
			j := at[x.To]
			if j == len(b.Ins) || !b.Ins[j].IsJa() || b.Ins[j].keep || b.Ins[j].To == x.To {
				break
			}
			x.To, changed = b.Ins[j].To, true
		}
	}
	if len(b.Ins) < maxInverted {
		changed = b.invert(at) || changed
	}
	reached := b.reached(at)
	next := len(b.Ins)
	for i := len(b.Ins) - 1; i >= 0; i-- {
		x := &b.Ins[i]
		if x.Here != 0 || x.dead {
			continue
		}
		if !reached[i] || x.To != 0 && at[x.To] == next && x.OpCode != opMayGoto && !x.keep {
			x.dead, changed = true, true
			continue
		}
		next = i
	}
	return changed
}

// opposites maps conditions to their negations.
var opposites = map[asm.JumpOp]asm.JumpOp{asm.JEq: asm.JNE, asm.JNE: asm.JEq, asm.JGT: asm.JLE, asm.JLE: asm.JGT, asm.JGE: asm.JLT, asm.JLT: asm.JGE,
	asm.JSGT: asm.JSLE, asm.JSLE: asm.JSGT, asm.JSGE: asm.JSLT, asm.JSLT: asm.JSGE}

// maxInverted is the maximum number of instructions for inverting conditions. Inverting leaves the verifier more
// pending branches, at most 8,192.
const maxInverted = 12_000

// invert negates a condition jumping over a single jump, and gives it the target of that jump.
func (b *Builder) invert(at []int) (changed bool) {
	for i := 0; i+1 < len(b.Ins); i++ {
		x, j := &b.Ins[i], &b.Ins[i+1]
		if x.Here != 0 || x.dead || x.To == 0 || j.dead || !j.IsJa() || j.keep {
			continue
		}
		op, ok := opposites[x.OpCode.JumpOp()]
		next := i + 2
		for next < len(b.Ins) && (b.Ins[next].Here != 0 || b.Ins[next].dead) {
			next++
		}
		if ok && at[x.To] == next {
			x.OpCode, x.To = x.OpCode.SetJumpOp(op), j.To
			j.dead, changed = true, true
		}
	}
	return changed
}

func (b *Builder) reached(at []int) []bool {
	reached := make([]bool, len(b.Ins)+1)
	todo := []int{0}
	for len(todo) > 0 {
		i := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		for i < len(b.Ins) && !reached[i] {
			reached[i] = true
			x := &b.Ins[i]
			if x.Here == 0 && !x.dead {
				if x.To != 0 {
					todo = append(todo, at[x.To])
				}
				if x.ends() {
					break
				}
			}
			i++
		}
	}
	return reached
}

// ErrFar reports a jump beyond its maximum range.
var ErrFar = fmt.Errorf("%w: the code is too long for a jump", ErrTooLarge)
