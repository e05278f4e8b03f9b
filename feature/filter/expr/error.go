// SPDX-License-Identifier: Apache-2.0

package expr

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

// ErrSyntax matches every [Error].
var ErrSyntax = errors.New("invalid filter expression")

// Pos is a position in an expression: bytes from its start.
type Pos int

// Error is a mistake in an expression, with its position.
type Error struct {
	Source     string // the whole expression
	Pos        Pos
	Msg        string // the mistake and the accepted input
	Suggestion string // the probable intention, "" if nothing is close
}

// Unwrap returns ErrSyntax.
func (e *Error) Unwrap() error { return ErrSyntax }

// Position returns the line and column of the mistake, both from 1, the column in characters, and
// the line's text.
func (e *Error) Position() (line, column int, text string) {
	at := min(max(int(e.Pos), 0), len(e.Source))
	start := strings.LastIndexByte(e.Source[:at], '\n') + 1
	text, _, _ = strings.Cut(e.Source[start:], "\n")
	return 1 + strings.Count(e.Source[:at], "\n"), 1 + utf8.RuneCountInString(e.Source[start:at]), text
}

const shownLine = 160 // maximum characters of a line in an error

// Error returns text like
//
//	column 1: unknown field "udp.dstprt"; did you mean "udp.dstport"?
//	  udp.dstprt == 53
//	  ^
func (e *Error) Error() string {
	line, column, text := e.Position()
	var b strings.Builder
	if line > 1 {
		fmt.Fprintf(&b, "line %d, ", line)
	}
	fmt.Fprintf(&b, "column %d: %s", column, e.Msg)
	if e.Suggestion != "" {
		fmt.Fprintf(&b, "; did you mean %q?", e.Suggestion)
	}
	chars := []rune(strings.Map(printable, text))
	caret := column - 1
	// For a long line, only the part around the mistake is shown: sets have thousands of members.
	if len(chars) > shownLine {
		from := min(max(caret-shownLine/2, 0), len(chars)-shownLine)
		chars, caret = chars[from:from+shownLine], caret-from
	}
	fmt.Fprintf(&b, "\n  %s\n  %s^", string(chars), strings.Repeat(" ", caret))
	return b.String()
}

// printable replaces control characters, so the text stays one line above its caret.
func printable(r rune) rune {
	if r < ' ' || r == 0x7f {
		return ' '
	}
	return r
}
