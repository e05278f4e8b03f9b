// SPDX-License-Identifier: Apache-2.0

package strictyaml

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// parse reads the text into nodes and returns the root of its only document.
func (d *Decoder) parse(data []byte) (*yaml.Node, error) {
	if at := badText(data); at >= 0 {
		if r, n := utf8.DecodeRune(data[at:]); r == utf8.RuneError && n <= 1 {
			return nil, d.at(data, at, "not UTF-8 text (byte 0x%02x)", data[at])
		}
		return nil, d.at(data, at, "control character 0x%02x", data[at])
	}
	lines := &lineReader{rest: data}
	dec := yaml.NewDecoder(lines)
	var doc, second yaml.Node
	switch err := dec.Decode(&doc); {
	case errors.Is(err, io.EOF):
		return nil, d.at(data, 0, "the file is empty")
	case err != nil:
		return nil, d.syntax(data, lines.given, err)
	}
	switch err := dec.Decode(&second); {
	case err == nil:
		return nil, d.Errorf(&second, "", "a second document begins here; a file holds one, remove the line ---")
	case !errors.Is(err, io.EOF):
		return nil, d.syntax(data, lines.given, err)
	}
	root := doc.Content[0]
	if root.Kind == yaml.ScalarNode && root.ShortTag() == "!!null" {
		return nil, d.Errorf(root, "", "the file is empty")
	}
	return root, nil
}

// badText returns the offset of the first byte not allowed in YAML, or -1. The parser rejects
// these, too, but without a position.
func badText(data []byte) int {
	for i := 0; i < len(data); {
		r, n := utf8.DecodeRune(data[i:])
		control := r < ' ' && r != '\t' && r != '\n' && r != '\r' || r == 0x7f
		if control || r == utf8.RuneError && n <= 1 {
			return i
		}
		i += n
	}
	return -1
}

// at returns an error at a byte of the file.
func (d *Decoder) at(data []byte, offset int, format string, args ...any) error {
	before := data[:offset]
	line := 1 + bytes.Count(before, []byte("\n"))
	column := 1 + utf8.RuneCount(before[bytes.LastIndexByte(before, '\n')+1:])
	return &Error{File: d.file, Line: line, Column: column, Msg: fmt.Sprintf(format, args...)}
}

var (
	parserError   = regexp.MustCompile(`(?s)^yaml: (?:line \d+: )?(.*)$`)
	unknownAnchor = regexp.MustCompile(`^unknown anchor '(.*)' referenced$`)
)

// plainer maps the parser's messages to clearer ones with a remedy.
var plainer = map[string]string{
	"did not find expected key":                      "this line fits no key above; check the indentation and the quotes",
	"did not find expected '-' indicator":            "this line fits no list item above; check the indentation",
	"did not find expected ',' or '}'":               "a { is not closed, or a comma is missing",
	"did not find expected ',' or ']'":               "a [ is not closed, or a comma is missing",
	"found unexpected end of stream":                 "a quote is not closed",
	"found character that cannot start any token":    "a value cannot begin with this character; put it in quotes",
	"mapping values are not allowed in this context": "a key is not allowed here; check the indentation, or quote text containing ': '",
	"could not find expected ':'":                    "a key without ':'; write key: value",
}

// syntax adds the position and a clearer message to the parser's error.
func (d *Decoder) syntax(data []byte, given int, err error) error {
	e := &Error{File: d.file, Msg: err.Error(), Err: err}
	if m := parserError.FindStringSubmatch(e.Msg); m != nil {
		e.Msg = m[1]
	}
	number, line := brokenLine(data, given)
	text := strings.TrimLeft(line, " \t")
	e.Line, e.Column = number, 1+len(line)-len(text)
	if e.Column > 1 && text == "" {
		e.Column = 1
	}
	if a := unknownAnchor.FindStringSubmatch(e.Msg); a != nil {
		e.Msg = fmt.Sprintf("alias *%s: no anchor &%s before it", a[1], a[1])
		if before, _, ok := strings.Cut(line, "*"+a[1]); ok {
			e.Column = 1 + utf8.RuneCountInString(before)
		}
		return e
	}
	if tab := strings.IndexByte(line[:len(line)-len(text)], '\t'); tab >= 0 {
		e.Column, e.Msg = tab+1, "a tab cannot indent YAML; use spaces"
		return e
	}
	if words := plainer[e.Msg]; words != "" {
		e.Msg = words
	}
	return e
}

// lineReader gives the parser one line at a time. So the line number is known when the parser
// stops.
type lineReader struct {
	rest  []byte
	given int
}

func (r *lineReader) Read(p []byte) (int, error) {
	if len(r.rest) == 0 {
		return 0, io.EOF
	}
	end := bytes.IndexByte(r.rest, '\n') + 1
	if end > 0 && end <= len(p) {
		p = p[:end]
	}
	n := copy(p, r.rest)
	if n > 0 && (r.rest[n-1] == '\n' || n == len(r.rest)) {
		r.given++
	}
	r.rest = r.rest[n:]
	return n, nil
}

// brokenLine finds the line with the syntax error: the one after the longest valid prefix. The
// parser itself only reports the line where the surrounding construct begins. It counts from 0 or
// from 1, and omits the first line. given is the number of lines read by the parser.
func brokenLine(data []byte, given int) (number int, text string) {
	const budget = 16 << 20 // bytes to parse in the search, some seconds
	lines := bytes.SplitAfter(data, []byte("\n"))
	given = min(max(given, 1), len(lines))
	size := 0
	for _, l := range lines[:given] {
		size += len(l)
	}
	number = given
	for spent := 0; number > 1 && spent < budget; number-- {
		spent += size
		size -= len(lines[number-1])
		if wellFormed(data[:size]) {
			break
		}
	}
	if len(bytes.TrimSpace(lines[number-1])) == 0 && number < given {
		number++ // the mistake is after a blank line
	}
	return number, strings.TrimRight(string(lines[number-1]), "\r\n")
}

func wellFormed(data []byte) bool {
	dec := yaml.NewDecoder(bytes.NewReader(data))
	for {
		var n yaml.Node
		if err := dec.Decode(&n); err != nil {
			return errors.Is(err, io.EOF)
		}
	}
}
