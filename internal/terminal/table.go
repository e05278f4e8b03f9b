// SPDX-License-Identifier: Apache-2.0

package terminal

import (
	"slices"
	"strings"
	"text/tabwriter"
	"unicode/utf8"
)

const gap = 2 // spaces between columns

// netnsHeading is the heading of network namespaces. One namespace for all rows needs no column on a narrow terminal.
const netnsHeading = "NETNS"

// Table formats a table: indent, then cells in columns. The first line has the headings. On a terminal of fewer columns
// the widest columns, but never the first one, move out of the table until it fits: their values follow below each row,
// with their headings. columns is 0 without a terminal.
func Table(columns int, indent string, lines [][]string) string {
	if columns == 0 || tableWidth(lines, len(indent)) <= columns {
		return align(indent, lines)
	}
	if i := slices.Index(lines[0], netnsHeading); i > 0 && constant(lines[1:], i) {
		lines = without(lines, map[int]bool{i: true})
	}
	folded := map[int]bool{}
	for tableWidth(without(lines, folded), len(indent)) > columns && len(folded) < len(lines[0])-1 {
		widest := 0
		for i := 1; i < len(lines[0]); i++ {
			if !folded[i] && (widest == 0 || cellWidth(lines, i) >= cellWidth(lines, widest)) {
				widest = i
			}
		}
		folded[widest] = true
	}
	var out strings.Builder
	n := 0
	for row := range strings.Lines(align(indent, without(lines, folded))) {
		out.WriteString(strings.TrimRight(row, " \n") + "\n")
		if n > 0 {
			out.WriteString(details(indent+"    ", lines[0], lines[n], folded, columns))
		}
		n++
	}
	return out.String()
}

// align puts cells in columns.
func align(indent string, lines [][]string) string {
	var out strings.Builder
	t := tabwriter.NewWriter(&out, 0, 0, gap, ' ', 0)
	for _, cells := range lines {
		_, _ = t.Write([]byte(indent + strings.Join(cells, "\t") + "\n")) // a Builder returns no error
	}
	t.Flush()
	return out.String()
}

// tableWidth returns the columns of a table on a terminal.
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

// details returns the lines below a row: headings and values of the folded columns.
func details(indent string, headings, cells []string, folded map[int]bool, columns int) string {
	var out strings.Builder
	line := ""
	flush := func() {
		if line != "" {
			out.WriteString(WrapAt(columns, indent+line+"\n", indent+"  "))
			line = ""
		}
	}
	for i, value := range cells {
		if !folded[i] || value == "" || value == "-" {
			continue
		}
		item := strings.TrimSpace(headings[i] + " " + value)
		if line != "" && utf8.RuneCountInString(indent+line+item)+gap > columns {
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
