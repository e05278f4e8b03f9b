// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"fmt"
	"math"

	"github.com/cilium/ebpf/asm"
)

// label is a place in the code; 0 is none.
type label int32

// insn is an instruction, or the place of a label.
type insn struct {
	asm.Instruction
	to   label // where it jumps
	here label // not an instruction, but the place of this label
	dead bool
	keep bool   // a jump on the way to one that is too far: others do not go past it
	part copied // of what copies a word
}

// builder collects the instructions of one function. Jumps are resolved when it is done, when also those are taken out
// that lead to the next instruction, and what nothing leads to: the verifier refuses it.
type builder struct {
	ins    []insn
	labels label
	noted  bool           // notes are kept
	note   string         // of what comes next
	notes  map[int]string // by instruction
	filled []held         // what helpers write
}

func (b *builder) label() label {
	b.labels++
	return b.labels
}

func (b *builder) bind(l label) { b.ins = append(b.ins, insn{here: l}) }

func (b *builder) op(ins ...asm.Instruction) {
	b.keepNote()
	for _, i := range ins {
		b.ins = append(b.ins, insn{Instruction: i})
	}
}

// jump adds a conditional jump; i comes from asm without a label.
func (b *builder) jump(i asm.Instruction, to label) {
	b.keepNote()
	b.ins = append(b.ins, insn{Instruction: i, to: to})
}

// keepNote gives the next instruction its note.
func (b *builder) keepNote() {
	if b.noted && b.note != "" {
		if b.notes == nil {
			b.notes = map[int]string{}
		}
		b.notes[len(b.ins)] = b.note
	}
	b.note = ""
}

func (b *builder) goTo(to label) { b.jump(asm.Ja.Label(""), to) }

// mostBetween is how many instructions lie between two relays: a jump reaches 32,767,
// and a rule of some thousand members of a set may lie on the way.
const mostBetween = 6_000

// relay puts a jump to a label here that jumps from before can take, and returns what jumps from here on take instead of it.
func (b *builder) relay(to label) label {
	over, next := b.label(), b.label()
	b.goTo(over)
	b.bind(to)
	b.goTo(next)
	b.ins[len(b.ins)-1].keep = true
	b.bind(over)
	return next
}

var (
	opJa   = asm.Ja.Label("").OpCode
	opExit = asm.Return().OpCode

	opMayGoto = mayGoto(0).OpCode
)

func (i *insn) isJa() bool { return i.to != 0 && i.OpCode == opJa }

func (i *insn) ends() bool { return i.isJa() || i.to == 0 && i.OpCode == opExit }

// places are, by label, the index of the next instruction that is alive.
func (b *builder) places() []int {
	at := make([]int, b.labels+1)
	next := len(b.ins)
	for i := len(b.ins) - 1; i >= 0; i-- {
		switch x := &b.ins[i]; {
		case x.here != 0:
			at[x.here] = next
		case !x.dead:
			next = i
		}
	}
	return at
}

// note says what the instructions from one on are for. They are not kept as comments of the instructions, which would go to
// the kernel as line numbers and take longer to load than the program.
type note struct {
	at   int
	text string
}

// finish resolves the jumps. What is too far away for one is an error.
func (b *builder) finish() (out asm.Instructions, notes []note, err error) {
	for b.thread() {
	}
	b.shrink()
	at := b.places()
	offset, n := make([]int, len(b.ins)+1), 0
	for i := range b.ins {
		offset[i] = n
		if x := &b.ins[i]; x.here == 0 && !x.dead {
			n += int(x.Width())
		}
	}
	offset[len(b.ins)] = n
	out = make(asm.Instructions, 0, n)
	for i := range b.ins {
		x := &b.ins[i]
		if x.here != 0 || x.dead {
			continue
		}
		if x.to != 0 {
			far := offset[at[x.to]] - offset[i] - 1
			if far > math.MaxInt16 || far < math.MinInt16 {
				return nil, nil, errFar
			}
			x.Offset = int16(far)
			x.Metadata = asm.Metadata{} // asm's jumps name their target there
		}
		if text := b.notes[i]; text != "" {
			notes = append(notes, note{len(out), text})
		}
		out = append(out, x.Instruction)
	}
	return out, notes, nil
}

// thread has jumps to jumps go to their ends, and drops what is not reached or does nothing. It says whether it changed
// anything.
func (b *builder) thread() (changed bool) {
	at := b.places()
	for i := range b.ins {
		x := &b.ins[i]
		if x.to == 0 || x.dead {
			continue
		}
		for range 64 { // a loop of nothing but jumps would not end
			j := at[x.to]
			if j == len(b.ins) || !b.ins[j].isJa() || b.ins[j].keep || b.ins[j].to == x.to {
				break
			}
			x.to, changed = b.ins[j].to, true
		}
	}
	if len(b.ins) < mostInverted {
		changed = b.invert(at) || changed
	}
	reached := b.reached(at)
	next := len(b.ins)
	for i := len(b.ins) - 1; i >= 0; i-- {
		x := &b.ins[i]
		if x.here != 0 || x.dead {
			continue
		}
		if !reached[i] || x.to != 0 && at[x.to] == next && x.OpCode != opMayGoto && !x.keep {
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

// mostInverted is below how many instructions conditions are inverted: the verifier then has more branches to follow later,
// of which it takes 8,192.
const mostInverted = 12_000

// invert has a condition that jumps over nothing but a jump be the opposite one, which takes that jump.
func (b *builder) invert(at []int) (changed bool) {
	for i := 0; i+1 < len(b.ins); i++ {
		x, j := &b.ins[i], &b.ins[i+1]
		if x.here != 0 || x.dead || x.to == 0 || j.dead || !j.isJa() || j.keep {
			continue
		}
		op, ok := opposites[x.OpCode.JumpOp()]
		next := i + 2
		for next < len(b.ins) && (b.ins[next].here != 0 || b.ins[next].dead) {
			next++
		}
		if ok && at[x.to] == next {
			x.OpCode, x.to = x.OpCode.SetJumpOp(op), j.to
			j.dead, changed = true, true
		}
	}
	return changed
}

func (b *builder) reached(at []int) []bool {
	reached := make([]bool, len(b.ins)+1)
	todo := []int{0}
	for len(todo) > 0 {
		i := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		for i < len(b.ins) && !reached[i] {
			reached[i] = true
			x := &b.ins[i]
			if x.here == 0 && !x.dead {
				if x.to != 0 {
					todo = append(todo, at[x.to])
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

var errFar = fmt.Errorf("%w: the code is too long for a jump", ErrTooLarge)
