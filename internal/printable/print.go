// SPDX-License-Identifier: Apache-2.0

package printable

import (
	"fmt"
	"io"
	"strings"
)

// Fprintf is fmt.Fprintf with escaped arguments: each stays on one line. Only errors may have
// several lines, for example from errors.Join.
func Fprintf(w io.Writer, format string, args ...any) (int, error) {
	return fmt.Fprintf(w, format, formatters(args)...)
}

// Fprintln is fmt.Fprintln with escaped arguments.
func Fprintln(w io.Writer, args ...any) (int, error) {
	return fmt.Fprintln(w, texts(args)...)
}

// Fprint is fmt.Fprint with escaped arguments.
func Fprint(w io.Writer, args ...any) (int, error) {
	return fmt.Fprint(w, texts(args)...)
}

// number reports whether an argument cannot contain text.
func number(v any) bool {
	switch v.(type) {
	case nil, bool, int, int8, int16, int32, int64, uint, uint8, uint16, uint32, uint64, uintptr, float32, float64:
		return true
	}
	return false
}

func formatters(args []any) []any {
	out := make([]any, len(args))
	for i, v := range args {
		if out[i] = v; !number(v) {
			out[i] = formatter{v}
		}
	}
	return out
}

func texts(args []any) []any {
	out := make([]any, len(args))
	for i, v := range args {
		if out[i] = v; !number(v) {
			out[i] = harmless(v, fmt.Sprint(v))
		}
	}
	return out
}

// formatter formats a value by any verb, and escapes the text.
type formatter struct{ v any }

// Format implements fmt.Formatter.
func (f formatter) Format(s fmt.State, verb rune) {
	_, _ = io.WriteString(s, harmless(f.v, fmt.Sprintf(fmt.FormatString(s, verb), f.v))) // same as fmt
}

func harmless(v any, text string) string {
	if _, ok := v.(error); ok {
		return Lines(text)
	}
	return Text(text)
}

// The rest forwards to fmt, for packages with this one in place of fmt.

// Errorf is fmt.Errorf.
func Errorf(format string, args ...any) error { return fmt.Errorf(format, args...) }

// Sprintf is fmt.Sprintf.
func Sprintf(format string, args ...any) string { return fmt.Sprintf(format, args...) }

// Sprint is fmt.Sprint.
func Sprint(args ...any) string { return fmt.Sprint(args...) }

// Count returns a number of things in words: "1 flow", "2 flows", "3 entries", "4 prefixes".
func Count[N ~int | ~uint32 | ~uint64](n N, thing string) string {
	switch {
	case n == 1:
	case strings.HasSuffix(thing, "s"), strings.HasSuffix(thing, "x"):
		thing += "es"
	case strings.HasSuffix(thing, "ry"):
		thing = strings.TrimSuffix(thing, "y") + "ies"
	default:
		thing += "s"
	}
	return fmt.Sprintf("%d %s", n, thing)
}
