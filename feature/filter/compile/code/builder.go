// SPDX-License-Identifier: Apache-2.0

// Package code builds the instructions of a program: labels and jumps, a short stack, and instructions that cilium/ebpf
// cannot write. It knows nothing of filters.
package code

import (
	"errors"
	"fmt"
	"math"

	"github.com/cilium/ebpf/asm"
)

// ErrTooLarge says that the rules are more than a program can hold.
var ErrTooLarge = errors.New("too many rules for one program")

// License is what programs are loaded with.
const License = "Dual BSD/GPL"

// Label is a place in the code; 0 is none.
type Label int32

// Insn is an instruction, or the place of a label.
type Insn struct {
	asm.Instruction
	To   Label // where it jumps
	Here Label // not an instruction, but the place of this label
	dead bool
	keep bool   // a jump on the way to one that is too far: others do not go past it
	Part Copied // of what copies a word
}

// Builder collects the instructions of one function. Jumps are resolved when it is done, when also those are taken out
// that lead to the next instruction, and what nothing leads to: the verifier refuses it.
type Builder struct {
	Ins    []Insn
	labels Label
	Noted  bool           // notes are kept
	Note   string         // of what comes next
	Notes  map[int]string // by instruction
	filled []stackRange   // what helpers write
	image  int            // where the image of the packet begins, from the frame pointer
}

// Label makes a label, which Bind places.
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

// Jump adds a conditional jump; i comes from asm without a label.
func (b *Builder) Jump(i asm.Instruction, to Label) {
	b.keepNote()
	b.Ins = append(b.Ins, Insn{Instruction: i, To: to})
}

// keepNote gives the next instruction its note.
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

// MaxBetween is how many instructions lie between two relays: a jump reaches 32,767,
// and a rule of some thousand members of a set may lie on the way.
const MaxBetween = 6_000

// Relay puts a jump to a label here that jumps from before can take, and returns what jumps from here on take instead of it.
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

// IsJa says whether the instruction is an unconditional jump to a label.
func (i *Insn) IsJa() bool { return i.To != 0 && i.OpCode == opJa }

func (i *Insn) ends() bool { return i.IsJa() || i.To == 0 && i.OpCode == opExit }

// labelIndexes are, by label, the index of the next instruction that is alive.
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

// Note says what the instructions from one on are for. They are not kept as comments of the instructions, which would go to
// the kernel as line numbers and take longer to load than the program.
type Note struct {
	At   int
	Text string
}

// Finish resolves the jumps, and moves the stack together. image is where the image of the packet, which R8 points to, begins
// from the frame pointer. A jump that is too long is an error.
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
			x.Metadata = asm.Metadata{} // asm's jumps name their target there
		}
		if text := b.Notes[i]; text != "" {
			notes = append(notes, Note{len(out), text})
		}
		out = append(out, x.Instruction)
	}
	return out, notes, nil
}

// thread has jumps to jumps go to their ends, and drops what is not reached or does nothing. It says whether it changed
// anything.
func (b *Builder) thread() (changed bool) {
	at := b.labelIndexes()
	for i := range b.Ins {
		x := &b.Ins[i]
		if x.To == 0 || x.dead {
			continue
		}
		for range 64 { // a loop of nothing but jumps would not end
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

// opposites are the conditions that are true where others are not.
var opposites = map[asm.JumpOp]asm.JumpOp{asm.JEq: asm.JNE, asm.JNE: asm.JEq, asm.JGT: asm.JLE, asm.JLE: asm.JGT, asm.JGE: asm.JLT, asm.JLT: asm.JGE,
	asm.JSGT: asm.JSLE, asm.JSLE: asm.JSGT, asm.JSGE: asm.JSLT, asm.JSLT: asm.JSGE}

// maxInverted is below how many instructions conditions are inverted: the verifier then has more branches to follow later,
// of which it takes 8,192.
const maxInverted = 12_000

// invert has a condition that jumps over nothing but a jump be the opposite one, which takes that jump.
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

// ErrFar says that a jump is too long.
var ErrFar = fmt.Errorf("%w: the code is too long for a jump", ErrTooLarge)
