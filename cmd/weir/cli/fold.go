// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"unicode/utf8"

	"github.com/weir-project/weir/internal/terminal"
)

const gap = 2 // spaces between columns

// netnsHeading is the heading of network namespaces. One namespace for all rows needs no column on a narrow terminal.
const netnsHeading = "NETNS"

// tableWidth returns the columns that a table needs on a terminal. lines are its cells, the first one the headings.
func tableWidth(lines [][]string, indent int) int {
	width := indent - gap
	for i := range lines[0] {
		width += cellWidth(lines, i) + gap
	}
	return width
}

// cellWidth returns the width of a column without the gap.
func cellWidth(lines [][]string, column int) (width int) {
	for _, cells := range lines {
		width = max(width, utf8.RuneCountInString(cells[column]))
	}
	return width
}

// printFolded prints a table that is wider than the terminal. The widest columns, but never the first one, move out of
// the table, until it fits. Their values follow below each row, with their headings.
func printFolded(w io.Writer, indent string, lines [][]string, width int) {
	if i := slices.Index(lines[0], netnsHeading); i > 0 && constant(lines[1:], i) {
		for n := range lines {
			lines[n] = slices.Delete(lines[n], i, i+1)
		}
	}
	folded := map[int]bool{}
	for tableWidth(without(lines, folded), len(indent)) > width && len(folded) < len(lines[0])-1 {
		widest := 0
		for i := 1; i < len(lines[0]); i++ {
			if !folded[i] && (widest == 0 || cellWidth(lines, i) >= cellWidth(lines, widest)) {
				widest = i
			}
		}
		folded[widest] = true
	}
	var table strings.Builder
	t := tabwriter.NewWriter(&table, 0, 0, gap, ' ', 0)
	for _, cells := range without(lines, folded) {
		_, _ = io.WriteString(t, indent+strings.Join(cells, "\t")+"\n") // a Builder returns no error
	}
	t.Flush()
	n := 0
	for row := range strings.Lines(table.String()) {
		_, _ = io.WriteString(w, strings.TrimRight(row, " \n")+"\n"+details(w, indent+"    ", lines, n, folded, width))
		n++
	}
}

// constant reports whether a column has the same value in all rows.
func constant(rows [][]string, column int) bool {
	return !slices.ContainsFunc(rows, func(cells []string) bool { return cells[column] != rows[0][column] })
}

// without returns the table without some columns.
func without(lines [][]string, folded map[int]bool) [][]string {
	out := make([][]string, len(lines))
	for n, cells := range lines {
		for i, c := range cells {
			if !folded[i] {
				out[n] = append(out[n], c)
			}
		}
	}
	return out
}

// details returns the lines below row n: headings and values of the folded columns. Row 0 has the headings.
func details(w io.Writer, indent string, lines [][]string, n int, folded map[int]bool, width int) string {
	if n == 0 {
		return ""
	}
	var out strings.Builder
	line := ""
	flush := func() {
		if line != "" {
			out.WriteString(terminal.Wrap(w, indent+line+"\n", indent+"  "))
			line = ""
		}
	}
	for i, value := range lines[n] {
		if !folded[i] || value == "" || value == "-" {
			continue
		}
		item := strings.TrimSpace(lines[0][i] + " " + value)
		if line != "" && utf8.RuneCountInString(indent+line+item)+gap > width {
			flush()
		}
		if line != "" {
			line += strings.Repeat(" ", gap)
		}
		line += item
	}
	flush()
	return out.String()
}

// Reflow breaks paragraphs with a line of more columns anew. Indented lines are tables and examples: they stay.
func Reflow(text string, columns int) string {
	var out, words []string
	long := false
	begin := 0
	lines := append(strings.Split(text, "\n"), "")
	for i, line := range lines {
		if line != "" && !strings.HasPrefix(line, " ") {
			words = append(words, strings.Fields(line)...)
			long = long || utf8.RuneCountInString(line) > columns
			continue
		}
		if long {
			out = append(out, fill(words, columns)...)
		} else {
			out = append(out, lines[begin:i]...)
		}
		out = append(out, line)
		words, long, begin = nil, false, i+1
	}
	return strings.Join(out[:len(out)-1], "\n")
}

// fill returns lines of words.
func fill(words []string, columns int) (lines []string) {
	line := words[0]
	for _, word := range words[1:] {
		if utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > columns {
			lines = append(lines, line)
			line = word
		} else {
			line += " " + word
		}
	}
	return append(lines, line)
}
