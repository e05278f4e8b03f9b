// SPDX-License-Identifier: Apache-2.0

package expr

import (
	"strconv"
	"strings"
)

type kind uint8

const (
	end    kind = iota
	word        // names, numbers, addresses: the field determines the kind
	text        // "…", without its quotes
	symbol      // operators and brackets
)

type token struct {
	kind kind
	s    string
	pos  Pos
}

func (t token) String() string {
	switch t.kind {
	case end:
		return "the end"
	case text:
		return strconv.Quote(t.s)
	}
	return t.s
}

// symbols has the longer ones first.
var symbols = []string{"==", "!=", "<=", ">=", "&&", "||", "^^", "..", "<", ">", "&", "!", "~", "(", ")", "{", "}", "[", "]", ","}

func isWord(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.IndexByte("_.:/$-", c) >= 0
}

// lex splits an expression into tokens; the last one is the end.
func lex(src string) ([]token, *Error) {
	out := make([]token, 0, len(src)/3+2)
next:
	for i := 0; i < len(src); {
		c := src[i]
		if c == ' ' || c == '\t' || c == '\n' || c == '\r' {
			i++
			continue
		}
		if raw := strings.HasPrefix(src[i:], `r"`); c == '"' || raw {
			read := lexText
			if raw {
				read = lexRaw
			}
			t, n, err := read(src, i)
			if err != nil {
				return nil, err
			}
			out = append(out, t)
			i += n
			continue
		}
		if s := src[i:]; strings.HasPrefix(s, "===") || strings.HasPrefix(s, "!==") || strings.HasPrefix(s, "<>") {
			return nil, unexpected(src, i)
		}
		for _, s := range symbols {
			if s[0] == c && strings.HasPrefix(src[i:], s) {
				out = append(out, token{symbol, s, Pos(i)})
				i += len(s)
				continue next
			}
		}
		j := i
		for j < len(src) && isWord(src[j]) && (src[j] != '.' || !strings.HasPrefix(src[j:], "..")) {
			j++
		}
		if j == i {
			return nil, unexpected(src, i)
		}
		out = append(out, token{word, src[i:j], Pos(i)})
		i = j
	}
	return append(out, token{end, "", Pos(len(src))}), nil
}

// unexpected returns the error for a character not beginning a token.
func unexpected(src string, at int) *Error {
	e := &Error{Source: src, Pos: Pos(at), Msg: "unexpected character " + quoteRune(src[at:])}
	switch s := src[at:]; {
	case strings.HasPrefix(s, "===") || strings.HasPrefix(s, "!=="):
		e.Msg = s[:3] + " is unknown: == is true if any of a field's values is equal, != if none is"
	case strings.HasPrefix(s, "=~"):
		e.Msg, e.Suggestion = "=~ is unknown", "matches"
	case strings.HasPrefix(s, "=>"), strings.HasPrefix(s, "=<"):
		e.Msg, e.Suggestion = s[:2]+" is unknown", s[1:2]+"="
	case strings.HasPrefix(s, "<>"):
		e.Msg, e.Suggestion = "<> is unknown", "!="
	case s[0] == '=':
		e.Msg, e.Suggestion = "= is unknown", "=="
	case s[0] == '|':
		e.Msg, e.Suggestion = "| is unknown", "||"
	case s[0] == '^':
		e.Msg, e.Suggestion = "^ is unknown", "xor"
	case s[0] == '\'':
		e.Msg = "unexpected ': texts are written \"…\""
	}
	return e
}

// quoteRune quotes the first character of s.
func quoteRune(s string) string {
	for _, r := range s {
		return strconv.QuoteRune(r)
	}
	return ""
}

// lexText reads "…" with \", \\, \n, \r, \t, \0 and \xHH, and returns its length.
func lexText(src string, at int) (token, int, *Error) {
	var b []byte
	for i := at + 1; i < len(src); i++ {
		switch c := src[i]; c {
		case '"':
			return token{text, string(b), Pos(at)}, i + 1 - at, nil
		case '\\':
			c, n := escape(src[i+1:])
			if n == 0 {
				return token{}, 0, &Error{Source: src, Pos: Pos(i), Msg: `unknown escape: want \" \\ \n \r \t \0 or \xHH; a backslash of a pattern is written \\`}
			}
			b = append(b, c)
			i += n
		default:
			b = append(b, c)
		}
	}
	return token{}, 0, &Error{Source: src, Pos: Pos(at), Msg: `this text has no closing "`}
}

// lexRaw reads r"…" with literal backslashes, for patterns.
func lexRaw(src string, at int) (token, int, *Error) {
	s, _, closed := strings.Cut(src[at+2:], `"`)
	if !closed {
		return token{}, 0, &Error{Source: src, Pos: Pos(at), Msg: `this text has no closing "`}
	}
	return token{text, s, Pos(at)}, len(s) + 3, nil
}

// escape decodes the text after a backslash. It returns the byte and the length of its escape, 0 if
// unknown.
func escape(s string) (byte, int) {
	if s == "" {
		return 0, 0
	}
	if i := strings.IndexByte(`"\nrt0`, s[0]); i >= 0 {
		return "\"\\\n\r\t\x00"[i], 1
	}
	if s[0] == 'x' && len(s) >= 3 {
		if v, err := strconv.ParseUint(s[1:3], 16, 8); err == nil {
			return byte(v), 3
		}
	}
	return 0, 0
}

// quote writes bytes in the syntax of lexText.
func quote(s []byte) string {
	var b strings.Builder
	b.WriteByte('"')
	for _, c := range s {
		switch {
		case c == '"' || c == '\\':
			b.WriteByte('\\')
			b.WriteByte(c)
		case c >= ' ' && c < 0x7f:
			b.WriteByte(c)
		default:
			b.WriteString(`\x`)
			b.WriteByte("0123456789abcdef"[c>>4])
			b.WriteByte("0123456789abcdef"[c&15])
		}
	}
	b.WriteByte('"')
	return b.String()
}
