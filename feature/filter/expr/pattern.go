// SPDX-License-Identifier: Apache-2.0

package expr

import (
	"errors"
	"fmt"
	"regexp"
	"regexp/syntax"
)

// Pattern is a regular expression over bytes. Each byte is the character with its number.
type Pattern struct {
	Text string
	Prog *syntax.Prog // of runes 0 to 255
	re   *regexp.Regexp
}

// Limits of patterns: their automaton must fit a program.
const (
	maxPattern = 256 // bytes of text
	maxProgram = 512 // instructions of the nondeterministic automaton
)

// newPattern parses a pattern: literals, ., classes, ?, *, +, {n,m}, alternatives, groups, and ^
// and $ for the ends of the searched bytes.
func newPattern(s string) (*Pattern, error) {
	if s == "" || len(s) > maxPattern {
		return nil, fmt.Errorf("a pattern has 1 to %d bytes", maxPattern)
	}
	// A byte of the pattern matches the same byte of the packet, so both are read as Latin-1.
	t := latin1([]byte(s))
	const flags = syntax.ClassNL | syntax.PerlX | syntax.OneLine | syntax.DotNL
	tree, err := syntax.Parse(t, flags)
	if err != nil {
		var se *syntax.Error
		if errors.As(err, &se) {
			return nil, fmt.Errorf("pattern: %s: %q", se.Code, se.Expr)
		}
		return nil, fmt.Errorf("pattern: %v", err)
	}
	if op := beyond(tree); op != "" {
		return nil, fmt.Errorf("pattern: %s is not supported: want literals, classes, ., ?, *, +, {n,m}, |, groups, ^ and $", op)
	}
	prog, err := syntax.Compile(tree.Simplify())
	if err != nil {
		return nil, fmt.Errorf("pattern: %v", err)
	}
	if len(prog.Inst) > maxProgram {
		return nil, fmt.Errorf("pattern has %d states: want at most %d", len(prog.Inst), maxProgram)
	}
	re, err := regexp.Compile("(?s)" + t)
	if err != nil {
		return nil, fmt.Errorf("pattern: %v", err)
	}
	return &Pattern{Text: s, Prog: prog, re: re}, nil
}

// beyond returns the first unsupported element of a pattern, or "".
func beyond(r *syntax.Regexp) string {
	switch {
	case r.Op == syntax.OpWordBoundary || r.Op == syntax.OpNoWordBoundary:
		return `\b`
	case r.Op == syntax.OpBeginLine || r.Op == syntax.OpEndLine:
		return "(?m)"
	}
	for _, s := range r.Sub {
		if op := beyond(s); op != "" {
			return op
		}
	}
	return ""
}

// latin1 converts each byte to the character with its number.
func latin1(b []byte) string {
	r := make([]rune, len(b))
	for i, c := range b {
		r[i] = rune(c)
	}
	return string(r)
}

// match searches b.
func (p *Pattern) match(b []byte) bool { return p.re.MatchString(latin1(b)) }
