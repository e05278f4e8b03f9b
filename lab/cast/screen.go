// SPDX-License-Identifier: Apache-2.0

package cast

import (
	"strconv"
	"strings"
	"unicode/utf8"
)

// cell is a character with its style, an SGR parameter list.
type cell struct {
	r     rune
	style string
}

// screen follows the output of lab.Terminal. It knows only its sequences: positions, the end of a line,
// styles, the alternate screen.
type screen struct {
	cells    [][]cell
	row, col int
	style    string
	rest     string // of an incomplete sequence
}

func newScreen(columns, rows int) *screen {
	s := &screen{cells: make([][]cell, rows)}
	for i := range s.cells {
		s.cells[i] = make([]cell, columns)
	}
	return s
}

func (s *screen) write(text string) {
	text = s.rest + text
	s.rest = ""
	for len(text) > 0 {
		if text[0] == 0x1b {
			end := strings.IndexFunc(text[1:], func(r rune) bool { return r >= 'A' && r <= 'Z' || r >= 'a' && r <= 'z' })
			if end < 0 {
				s.rest = text
				return
			}
			s.sequence(text[2:1+end], text[1+end])
			text = text[2+end:]
			continue
		}
		r, n := utf8.DecodeRuneInString(text)
		text = text[n:]
		switch r {
		case '\r':
			s.col = 0
		case '\n':
			s.row++
			s.scroll()
		default:
			s.put(r)
		}
	}
}

// put writes a character at the cursor.
func (s *screen) put(r rune) {
	if s.row < len(s.cells) && s.col < len(s.cells[s.row]) {
		s.cells[s.row][s.col] = cell{r, s.style}
		s.col++
	}
}

// scroll moves the lines up if the cursor is below the last one.
func (s *screen) scroll() {
	for ; s.row >= len(s.cells); s.row-- {
		s.cells = append(s.cells[1:], make([]cell, len(s.cells[0])))
	}
}

// sequence executes an escape sequence.
func (s *screen) sequence(parameters string, kind byte) {
	switch kind {
	case 'm':
		s.style = parameters
		if parameters == "0" {
			s.style = ""
		}
	case 'H':
		row, col, _ := strings.Cut(parameters, ";")
		s.row, s.col = number(row)-1, number(col)-1
	case 'K':
		if s.row < len(s.cells) {
			clear(s.cells[s.row][min(s.col, len(s.cells[s.row])):])
		}
	case 'J':
		for _, line := range s.cells {
			clear(line)
		}
	}
}

func number(s string) int {
	n, err := strconv.Atoi(s)
	if err != nil {
		return 1
	}
	return n
}

// run is a part of a line with one style.
type run struct {
	column int
	text   string
	style  string
}

// runs returns the parts of each line, without spaces at their ends.
func (s *screen) runs() [][]run {
	var all [][]run
	for _, line := range s.cells {
		var parts []run
		for col, c := range line {
			r := c.r
			if r == 0 {
				r = ' '
			}
			if n := len(parts); n > 0 && parts[n-1].style == c.style {
				parts[n-1].text += string(r)
			} else {
				parts = append(parts, run{col, string(r), c.style})
			}
		}
		all = append(all, trim(parts))
	}
	return all
}

// trim removes empty parts and outer spaces.
func trim(parts []run) (kept []run) {
	for _, p := range parts {
		text := strings.TrimLeft(p.text, " ")
		p.column += len(p.text) - len(text)
		if p.text = strings.TrimRight(text, " "); p.text != "" {
			kept = append(kept, p)
		}
	}
	return kept
}
