// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"regexp"
	"strings"
	"unicode/utf8"

	"github.com/weir-project/weir/internal/terminal"
)

// foldTables folds tables of more columns, as weir does on a terminal.
func foldTables(lines []string, columns int) (out []string) {
	for len(lines) > 0 {
		n := 1
		for isRow(lines[0]) && n < len(lines) && isRow(lines[n]) {
			n++
		}
		out = append(out, foldTable(lines[:n], columns)...)
		lines = lines[n:]
	}
	return out
}

// isRow reports whether a line has several spaces between columns.
func isRow(l string) bool { return strings.Contains(strings.TrimSpace(l), "  ") }

// heading matches the heading of a column.
var heading = regexp.MustCompile(`[A-Z0-9/]+( [A-Z0-9/]+)*`)

// foldTable folds a table. Its first line has the headings. Other lines stay.
func foldTable(lines []string, columns int) []string {
	wide := false
	for _, l := range lines {
		wide = wide || utf8.RuneCountInString(l) > columns
	}
	at := heading.FindAllStringIndex(lines[0], -1)
	if !wide || len(lines) < 2 || len(at) < 2 || strings.TrimSpace(heading.ReplaceAllString(lines[0], "")) != "" {
		return lines
	}
	cells := make([][]string, len(lines))
	for n, l := range lines {
		text := []rune(l)
		for i := range at {
			begin, end := min(at[i][0], len(text)), len(text)
			if i+1 < len(at) {
				end = min(at[i+1][0], len(text))
			}
			if begin > 0 && begin < len(text) && text[begin-1] != ' ' {
				return lines // not below its heading
			}
			cells[n] = append(cells[n], strings.TrimSpace(string(text[begin:end])))
		}
	}
	return strings.Split(strings.TrimSuffix(terminal.Table(columns, lines[0][:at[0][0]], cells), "\n"), "\n")
}
