// SPDX-License-Identifier: Apache-2.0

package main

import (
	"go/parser"
	"go/token"
	"regexp"
	"strings"
)

var (
	// directivePattern is a comment for a tool: //go:build, //nolint, SPDX.
	directivePattern = regexp.MustCompile(`^(?://[a-z]+:|//nolint|// SPDX-|// \+build|//export )`)
	generatedPattern = regexp.MustCompile(`(?m)^// Code generated .* DO NOT EDIT\.$`)
)

// goComments returns the comments of a Go file, a text for each group. Code
// inside comments (indented lines, the output of an Example) is no prose.
func goComments(file string, src []byte) ([]text, error) {
	if generatedPattern.Match(src) {
		return nil, nil
	}
	fset := token.NewFileSet()
	parsed, err := parser.ParseFile(fset, file, src, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	var out []text
	for _, group := range parsed.Comments {
		var lines []string
		for _, c := range group.List {
			switch {
			case directivePattern.MatchString(c.Text):
			case strings.HasPrefix(c.Text, "//"):
				lines = append(lines, c.Text[2:])
			default:
				lines = append(lines, strings.Split(c.Text[2:len(c.Text)-2], "\n")...)
			}
		}
		out = appendComment(out, file, fset.Position(group.Pos()).Line, lines)
	}
	return out, nil
}

// cComments returns the comments of a C file. Consecutive // comments are one text.
func cComments(file string, src []byte) []text {
	var out []text
	var lines []string // of the group of // comments under way
	start, last := 0, -1
	flush := func() {
		out = appendComment(out, file, start, lines)
		lines = nil
	}
	s, line := string(src), 1
	for i := 0; i < len(s); {
		switch {
		case s[i] == '"' || s[i] == '\'':
			i += quoted(s[i:])
		case strings.HasPrefix(s[i:], "//"):
			end := lineEnd(s, i)
			if line != last+1 {
				flush()
				start = line
			}
			if c := s[i:end]; !directivePattern.MatchString(c) {
				lines = append(lines, c[2:])
			}
			last, i = line, end
		case strings.HasPrefix(s[i:], "/*"):
			flush()
			n := strings.Index(s[i:], "*/")
			if n < 0 {
				return out
			}
			body := strings.Split(s[i+2:i+n], "\n")
			for k := range body {
				body[k] = strings.TrimLeft(strings.TrimLeft(body[k], " \t"), "*")
			}
			out = appendComment(out, file, line, body)
			line += len(body) - 1
			i += n + 2
		default:
			if s[i] == '\n' {
				line++
			}
			i++
		}
	}
	flush()
	return out
}

// quoted is the length of the C literal at the beginning of s.
func quoted(s string) int {
	for i := 1; i < len(s); i++ {
		switch s[i] {
		case '\\':
			i++
		case s[0]:
			return i + 1
		case '\n': // an apostrophe in #error
			return i
		}
	}
	return len(s)
}

func lineEnd(s string, from int) int {
	if n := strings.IndexByte(s[from:], '\n'); n >= 0 {
		return from + n
	}
	return len(s)
}

// appendComment appends the prose of the lines of a comment to out: a text for
// each paragraph, list item and heading.
func appendComment(out []text, file string, start int, lines []string) []text {
	var body []string
	from := start
	flush := func(next int) {
		if s := strings.TrimSpace(strings.Join(body, " ")); s != "" && !strings.HasPrefix(s, "SPDX-") {
			out = append(out, text{file, from, s})
		}
		body, from = nil, next
	}
	for i, l := range lines {
		trimmed := strings.TrimSpace(l)
		item := strings.HasPrefix(trimmed, "- ") || strings.HasPrefix(trimmed, "* ")
		switch {
		case trimmed == "Output:" || trimmed == "Unordered output:":
			flush(start + i)
			return out
		case trimmed == "":
			flush(start + i + 1)
		case strings.HasPrefix(l, "\t") && !item: // code, or the item's next line
			if len(body) > 0 && strings.HasPrefix(strings.TrimSpace(body[0]), "- ") {
				body = append(body, trimmed)
			}
		default:
			if item || strings.HasPrefix(trimmed, "# ") {
				flush(start + i)
			}
			body = append(body, trimmed)
		}
	}
	flush(0)
	return out
}
