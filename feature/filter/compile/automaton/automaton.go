// SPDX-License-Identifier: Apache-2.0

// Package automaton converts a regular expression to a deterministic automaton, as a table for BPF programs.
package automaton

import (
	"fmt"
	"regexp/syntax"
	"slices"

	"github.com/weir-project/weir/feature/filter/compile/code"
)

// Automaton is the table of a deterministic automaton. The next state is at index state<<8 | byte. The last row has 1
// for each state matching at the end of the input.
type Automaton struct {
	Table  []byte // a power of two of rows
	states int
}

// Reserved states.
const (
	Accepts   = 255 // the pattern has matched
	Dead      = 254 // no match is possible any more
	maxStates = 254
)

var errStates = fmt.Errorf("%w: pattern exceeds %d states: shorten or split it", code.ErrTooLarge, maxStates)

// states builds the automaton state by state.
type states struct {
	prog  *syntax.Prog
	seen  map[string]byte
	todo  [][]uint32
	rows  [][256]byte
	final []bool
}

// New builds an automaton for an unanchored search: a match may begin at any byte.
func New(p *syntax.Prog) (*Automaton, error) {
	s := &states{prog: p, seen: map[string]byte{}}
	start, matched := s.closure([]uint32{uint32(p.Start)}, true, false)
	if matched { // matched without any input
		return &Automaton{}, nil
	}
	if _, err := s.number(start); err != nil {
		return nil, err
	}
	for i := 0; i < len(s.todo); i++ {
		set := s.todo[i]
		// Check the end of the input. Only the first state is also at the beginning.
		_, final := s.closure(set, i == 0, true)
		s.final = append(s.final, final)
		var row [256]byte
		for c := range 256 {
			to, err := s.step(set, rune(c))
			if err != nil {
				return nil, err
			}
			row[c] = to
		}
		s.rows = append(s.rows, row)
	}
	return s.table(), nil
}

func (s *states) table() *Automaton {
	rows := 2
	for rows < len(s.rows)+1 {
		rows *= 2
	}
	a := &Automaton{Table: make([]byte, rows*256), states: len(s.rows)}
	for i, r := range s.rows {
		copy(a.Table[i*256:], r[:])
		if s.final[i] {
			a.Table[(rows-1)*256+i] = 1
		}
	}
	return a
}

// number returns the state of a set of threads.
func (s *states) number(set []uint32) (byte, error) {
	key := fmt.Sprint(set)
	if n, ok := s.seen[key]; ok {
		return n, nil
	}
	if len(s.todo) == maxStates {
		return 0, errStates
	}
	n := byte(len(s.todo))
	s.seen[key] = n
	s.todo = append(s.todo, set)
	return n, nil
}

// step returns the state after a byte.
func (s *states) step(set []uint32, c rune) (byte, error) {
	var next []uint32
	for _, pc := range set {
		if i := &s.prog.Inst[pc]; consumes(i) && i.MatchRune(c) {
			next = append(next, i.Out)
		}
	}
	next, matched := s.closure(append(next, uint32(s.prog.Start)), false, false)
	switch {
	case matched:
		return Accepts, nil
	case len(next) == 0:
		return Dead, nil
	}
	return s.number(next)
}

func consumes(i *syntax.Inst) bool {
	switch i.Op {
	case syntax.InstRune, syntax.InstRune1, syntax.InstRuneAny, syntax.InstRuneAnyNotNL:
		return true
	}
	return false
}

// closure follows transitions without input and reports whether they reach the match. Threads waiting for the end of
// the input stay in the set.
func (s *states) closure(pcs []uint32, begin, end bool) (set []uint32, matched bool) {
	seen := map[uint32]bool{}
	for todo := slices.Clone(pcs); len(todo) > 0; {
		pc := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		if seen[pc] {
			continue
		}
		seen[pc] = true
		i := &s.prog.Inst[pc]
		switch i.Op {
		case syntax.InstAlt, syntax.InstAltMatch:
			todo = append(todo, i.Out, i.Arg)
		case syntax.InstCapture, syntax.InstNop:
			todo = append(todo, i.Out)
		case syntax.InstMatch:
			matched = true
		case syntax.InstEmptyWidth:
			var have syntax.EmptyOp
			if begin {
				have |= syntax.EmptyBeginText
			}
			if end {
				have |= syntax.EmptyEndText
			}
			if want := syntax.EmptyOp(i.Arg); want&^have == 0 {
				todo = append(todo, i.Out)
			} else if want&^have == syntax.EmptyEndText {
				set = append(set, pc)
			}
		default:
			if consumes(i) {
				set = append(set, pc)
			}
		}
	}
	slices.Sort(set)
	return set, matched
}

// Literal returns a pattern matching exactly these bytes.
func Literal(b []byte) (*syntax.Prog, error) {
	r := &syntax.Regexp{Op: syntax.OpLiteral}
	for _, c := range b {
		r.Rune = append(r.Rune, rune(c))
	}
	return syntax.Compile(r)
}
