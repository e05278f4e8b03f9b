// SPDX-License-Identifier: Apache-2.0

// Package printable escapes text of strangers for output: names of processes and bindings, labels,
// contents of files and texts of peers. Terminals act on control characters. Bidirectional and
// invisible characters mislead people. Prometheus rejects invalid UTF-8. All of these become
// escapes as in Go and JSON: \n, \u001b, \xff.
package printable

import (
	"fmt"
	"hash/fnv"
	"io"
	"log/slog"
	"slices"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// Text returns s on one line, with escapes for all invisible characters.
func Text(s string) string {
	if plain(s) {
		return s
	}
	var b strings.Builder
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		escape(&b, r, s[:n])
		s = s[n:]
	}
	return b.String()
}

// Lines applies Text to each line of s.
func Lines(s string) string {
	lines := strings.Split(s, "\n")
	for i, l := range lines {
		lines[i] = Text(l)
	}
	return strings.Join(lines, "\n")
}

func plain(s string) bool {
	for i, r := range s {
		if !visible(r) {
			return false
		}
		if r == utf8.RuneError {
			if _, n := utf8.DecodeRuneInString(s[i:]); n == 1 {
				return false
			}
		}
	}
	return true
}

// visible reports whether a rune is shown as itself. Control and format characters, bidirectional
// ones included, line separators and unassigned code points are not.
func visible(r rune) bool {
	if r < utf8.RuneSelf {
		return r >= ' ' && r != 0x7f
	}
	return unicode.IsPrint(r) && !ignorable(r)
}

// ignorable reports whether a rune is an invisible letter or mark: a filler or a variation
// selector.
func ignorable(r rune) bool {
	switch {
	case r == 0x034f, r == 0x115f, r == 0x1160, r == 0x17b4, r == 0x17b5, r == 0x3164, r == 0xffa0, r == 0x2800:
		return true
	case r >= 0x180b && r <= 0x180f, r >= 0xfe00 && r <= 0xfe0f, r >= 0xe0100 && r <= 0xe01ef:
		return true
	}
	return false
}

func escape(b *strings.Builder, r rune, raw string) {
	switch {
	case r == utf8.RuneError && len(raw) == 1:
		fmt.Fprintf(b, `\x%02x`, raw[0])
	case visible(r):
		b.WriteString(raw)
	case r == '\n':
		b.WriteString(`\n`)
	case r == '\r':
		b.WriteString(`\r`)
	case r == '\t':
		b.WriteString(`\t`)
	case r > 0xffff: // as in JSON
		hi, lo := utf16.EncodeRune(r)
		fmt.Fprintf(b, `\u%04x\u%04x`, hi, lo)
	default:
		fmt.Fprintf(b, `\u%04x`, r)
	}
}

// Bounded is Text of at most n bytes. Longer text ends with a hash of the whole, so different texts
// stay different.
func Bounded(s string, n int) string {
	out := Text(s)
	if len(out) <= n {
		return out
	}
	h := fnv.New32a()
	_, _ = h.Write([]byte(s)) // never fails
	tail := fmt.Sprintf("...%08x", h.Sum32())
	cut := max(n-len(tail), 0)
	for cut > 0 && !utf8.RuneStart(out[cut]) {
		cut--
	}
	return out[:cut] + tail
}

// Writer passes lines to w, and escapes all other characters escaped by Text. JSON stays JSON. It
// is the last defence: text of strangers must not begin a line, and goes through Text first.
func Writer(w io.Writer) io.Writer { return &writer{w: w} }

type writer struct {
	w    io.Writer
	rest []byte // the first bytes of an incomplete rune
}

// Write implements io.Writer.
func (w *writer) Write(p []byte) (int, error) {
	in := p
	if len(w.rest) > 0 {
		in = append(w.rest, p...)
		w.rest = nil
	}
	var b strings.Builder
	for len(in) > 0 {
		if !utf8.FullRune(in) {
			w.rest = append([]byte(nil), in...)
			break
		}
		r, n := utf8.DecodeRune(in)
		if r == '\n' || r == '\t' {
			b.WriteByte(byte(r))
		} else {
			escape(&b, r, string(in[:n]))
		}
		in = in[n:]
	}
	if _, err := io.WriteString(w.w, b.String()); err != nil {
		return 0, err
	}
	return len(p), nil
}

// maxAttr is the maximum length of a value in a log, in bytes.
const maxAttr = 1024

// OneLine joins the lines of joined errors into one, each once. A list begins behind a colon.
func OneLine(text string) string {
	var lines []string
	for l := range strings.Lines(text) {
		l = strings.TrimSpace(l)
		said := slices.ContainsFunc(lines, func(x string) bool { return x == l || strings.HasSuffix(x, ": "+l) })
		if l != "" && !said {
			lines = append(lines, l)
		}
	}
	return strings.ReplaceAll(strings.Join(lines, "; "), ":; ", ": ")
}

// Attr limits and escapes the text of an attribute, for slog.HandlerOptions.
func Attr(_ []string, a slog.Attr) slog.Attr {
	switch v := a.Value.Resolve(); v.Kind() {
	case slog.KindString:
		a.Value = slog.StringValue(Bounded(v.String(), maxAttr))
	case slog.KindAny:
		switch v := v.Any().(type) {
		case error:
			a.Value = slog.StringValue(Bounded(OneLine(v.Error()), maxAttr))
		case fmt.Stringer:
			a.Value = slog.StringValue(Bounded(v.String(), maxAttr))
		case []string:
			a.Value = slog.StringValue(Bounded(fmt.Sprint(v), maxAttr))
		}
	}
	return a
}
