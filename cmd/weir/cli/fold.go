// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"strings"
	"unicode/utf8"
)

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
