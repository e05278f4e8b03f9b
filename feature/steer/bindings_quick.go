// SPDX-License-Identifier: Apache-2.0

package steer

import "bytes"

// encoding/json takes two seconds for a million bindings, most of a replace. What
// programs write has nothing in it that would need it.

// quickBindings reads a file in which every binding is an object of strings that are
// plain ASCII without escapes, and of a port. ok is false for any other file, also for
// one with an error: encoding/json then says what the file means, or what is wrong.
func quickBindings(text []byte) (out []Binding, at []int64, ok bool) {
	s := quickScanner{text: text}
	p := bindingsParser{out: make([]Binding, 0, bytes.Count(text, []byte{'{'}))}
	p.ends = make([]int64, 0, cap(p.out))
	names := map[string]string{} // so that a name is there once
	if !s.skip('{') || string(s.plain()) != "bindings" || !s.skip(':') || !s.skip('[') {
		return nil, nil, false
	}
	for n := 0; !s.skip(']'); n++ {
		if n > 0 && !s.skip(',') {
			return nil, nil, false
		}
		f, good := s.binding(names)
		if !good || p.add(f, int64(s.at)) != nil {
			return nil, nil, false
		}
	}
	return p.out, p.ends, s.skip('}') && s.next() == 0 && s.at == len(text)
}

type quickScanner struct {
	text []byte
	at   int
}

// next returns the next byte that is no white space, without taking it; 0 at the end.
func (s *quickScanner) next() byte {
	for ; s.at < len(s.text); s.at++ {
		switch b := s.text[s.at]; b {
		case ' ', '\t', '\n', '\r':
		default:
			return b
		}
	}
	return 0
}

// skip takes a byte if it comes next.
func (s *quickScanner) skip(b byte) bool {
	if s.next() != b {
		return false
	}
	s.at++
	return true
}

// plain takes a string; nil if it is not a plain one, or empty.
func (s *quickScanner) plain() []byte {
	if !s.skip('"') {
		return nil
	}
	for begin := s.at; s.at < len(s.text); s.at++ {
		switch b := s.text[s.at]; {
		case b == '"':
			s.at++
			return s.text[begin : s.at-1]
		case b < ' ' || b > '~' || b == '\\':
			return nil
		}
	}
	return nil
}

// number takes a port.
func (s *quickScanner) number() (n uint16, ok bool) {
	s.next()
	v, begin := 0, s.at
	for ; s.at < len(s.text) && s.at < begin+5 && '0' <= s.text[s.at] && s.text[s.at] <= '9'; s.at++ {
		v = 10*v + int(s.text[s.at]-'0')
	}
	return uint16(v), s.at > begin && v <= 0xffff && (s.text[begin] != '0' || s.at == begin+1)
}

func (s *quickScanner) binding(names map[string]string) (f fileBinding, ok bool) {
	if !s.skip('{') {
		return f, false
	}
	for seen := 0; ; {
		field := 0
		key := s.plain()
		if !s.skip(':') {
			return f, false
		}
		switch string(key) {
		case "port":
			field = 1
			if f.Port, ok = s.number(); !ok {
				return f, false
			}
		case "label":
			field = 2
			name := s.plain()
			if f.Label, ok = names[string(name)]; !ok {
				f.Label = string(name)
				names[f.Label] = f.Label
			}
		case "prefix":
			field = 4
			f.Prefix = string(s.plain())
		case "protocol":
			field = 8
			if f.Protocol = string(s.plain()); f.Protocol == "" {
				return f, false
			}
		}
		if field == 0 || seen&field != 0 {
			return f, false
		}
		seen |= field
		if s.skip('}') {
			return f, true
		}
		if !s.skip(',') {
			return f, false
		}
	}
}
