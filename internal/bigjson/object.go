// SPDX-License-Identifier: Apache-2.0

// Package bigjson reads large JSON objects of another user, one member at a time.
package bigjson

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// Limits of an object. A decoded value can be a hundred times larger than its text: null becomes a whole struct.
const (
	maxMembers = 64
	maxName    = 256      // bytes of a member's name, quoted
	MaxParts   = 2 << 20  // keys, and values other than strings, of a member
	MaxStrings = 16 << 20 // strings of a member
)

// Object is a JSON object. It holds the positions of its members, and reads none before it is asked for.
type Object struct {
	from    io.ReaderAt
	members []member
}

type member struct {
	name      string
	from, end int64 // the value
}

// Read finds the members of an object of size bytes, in constant memory. It checks brackets and strings; values are
// checked by their decoder.
func Read(from io.ReaderAt, size int64) (*Object, error) {
	s := scanner{in: bufio.NewReaderSize(io.NewSectionReader(from, 0, size), 64<<10)}
	o := &Object{from: from}
	if c := s.token(); c != '{' {
		return nil, s.wrong("a JSON object")
	}
	c := s.token()
	for c != '}' || len(o.members) > 0 {
		name, err := s.name(c)
		if err != nil {
			return nil, err
		}
		if s.token() != ':' {
			return nil, s.wrong("':'")
		}
		m := member{name: name, from: s.at}
		if c = s.value(); c != ',' && c != '}' {
			return nil, s.wrong("',' or '}'")
		}
		m.end = s.at - 1
		if len(o.members) == maxMembers {
			return nil, fmt.Errorf("more than %d members", maxMembers)
		}
		if _, twice := o.find(name); twice {
			return nil, fmt.Errorf("member %.64q is there twice", name)
		}
		o.members = append(o.members, m)
		if c == '}' {
			break
		}
		c = s.token()
	}
	if s.token(); s.err != io.EOF {
		return nil, s.wrong("the end")
	}
	return o, nil
}

func (o *Object) find(name string) (member, bool) {
	for _, m := range o.members {
		if m.name == name {
			return m, true
		}
	}
	return member{}, false
}

// Get reads the value of a member; nil if there is none. It rejects a value above the limits of [Check].
func (o *Object) Get(name string) ([]byte, error) {
	m, ok := o.find(name)
	if !ok {
		return nil, nil
	}
	text := make([]byte, m.end-m.from)
	if _, err := io.ReadFull(io.NewSectionReader(o.from, m.from, m.end-m.from), text); err != nil {
		return nil, err
	}
	return bytes.Trim(text, " \t\r\n"), Check(text)
}

// Without writes the object without some members, in constant memory.
func (o *Object) Without(w io.Writer, names map[string]bool) error {
	sep := "{"
	for _, m := range o.members {
		if names[m.name] {
			continue
		}
		name, err := json.Marshal(m.name)
		if err == nil {
			_, err = fmt.Fprintf(w, "%s%s:", sep, name)
		}
		if err == nil {
			_, err = io.Copy(w, io.NewSectionReader(o.from, m.from, m.end-m.from))
		}
		if err != nil {
			return err
		}
		sep = ","
	}
	if sep == "{" {
		_, err := io.WriteString(w, "{}")
		return err
	}
	_, err := io.WriteString(w, "}")
	return err
}

// Check rejects a value with more than [MaxParts] or [MaxStrings].
func Check(text []byte) error {
	parts, strings, inWord := 0, 0, false
	for i := 0; i < len(text); i++ {
		word := false
		switch c := text[i]; {
		case c == '"':
			strings++
			for i++; i < len(text) && text[i] != '"'; i++ {
				if text[i] == '\\' {
					i++
				}
			}
		case c == '{' || c == '[' || c == ':':
			parts++
		case c == ',' || c == '}' || c == ']' || c <= ' ':
		default: // a number or literal
			if word = true; !inWord {
				parts++
			}
		}
		inWord = word
	}
	if parts > MaxParts {
		return fmt.Errorf("more than %d values", MaxParts)
	}
	if strings > MaxStrings {
		return fmt.Errorf("more than %d strings", MaxStrings)
	}
	return nil
}

// scanner reads bytes of JSON.
type scanner struct {
	in  *bufio.Reader
	at  int64 // bytes read
	err error
}

// next returns the next byte, or 0 at the end or after an error.
func (s *scanner) next() byte {
	if s.err != nil {
		return 0
	}
	c, err := s.in.ReadByte()
	if err != nil {
		s.err = err
		return 0
	}
	s.at++
	return c
}

// token returns the next byte that is no white space.
func (s *scanner) token() byte {
	for {
		if c := s.next(); s.err != nil || c != ' ' && c != '\t' && c != '\n' && c != '\r' {
			return c
		}
	}
}

// name reads the rest of a member's name after its first byte c.
func (s *scanner) name(c byte) (name string, err error) {
	if c != '"' {
		return "", s.wrong("the name of a member")
	}
	for text := []byte{'"'}; len(text) < maxName; {
		c = s.next()
		text = append(text, c)
		switch {
		case s.err != nil:
			return "", s.wrong("the end of a name")
		case c == '\\':
			text = append(text, s.next())
		case c == '"':
			err = json.Unmarshal(text, &name)
			return name, err
		}
	}
	return "", errors.New("the name of a member is too long")
}

// value skips a value, and returns the byte behind it: the first comma or closing bracket outside of it.
func (s *scanner) value() byte {
	for depth := 0; ; {
		switch c := s.next(); c {
		case '"':
			s.skipString()
		case '{', '[':
			depth++
		case '}', ']':
			if depth == 0 {
				return c
			}
			depth--
		case ',':
			if depth == 0 {
				return c
			}
		}
		if s.err != nil {
			return 0
		}
	}
}

func (s *scanner) skipString() {
	for s.err == nil {
		switch s.next() {
		case '\\':
			s.next()
		case '"':
			return
		}
	}
}

func (s *scanner) wrong(want string) error {
	if s.err != nil && s.err != io.EOF {
		return s.err
	}
	return fmt.Errorf("byte %d: want %s", s.at, want)
}
