// SPDX-License-Identifier: Apache-2.0

package bindings

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/go-json-experiment/json/jsontext"
	"github.com/weir-project/weir/internal/safefile"
	"golang.org/x/sys/unix"
)

// fileBinding is a binding in tubular's file format. Without a protocol it means both, without a port every port.
type fileBinding struct {
	label, prefix, protocol string
	port                    uint16
}

// maxBindingsFile is the maximum size of a bindings file in bytes, enough for ten million bindings.
const maxBindingsFile = 2 << 30

// LoadBindingsFile reads a bindings file; "-" is standard input.
func LoadBindingsFile(path string) ([]Binding, error) {
	name, text, err := safefile.Input(path, maxBindingsFile)
	if err != nil {
		return nil, err
	}
	return parseBindings(name, text)
}

// parseBindings parses {"bindings": [{"label", "prefix", "port", "protocol"}, …]} and returns the bindings by address.
// Errors contain file and line.
func parseBindings(file string, text []byte) ([]Binding, error) {
	p := bindingsParser{file: file, text: text, dec: jsontext.NewDecoder(bytes.NewBuffer(text))}
	if err := p.whole(); err != nil {
		return nil, err
	}
	return p.once()
}

type bindingsParser struct {
	file string
	text []byte
	dec  *jsontext.Decoder
	out  []Binding
	ends []int64 // end offset of each binding
}

// fail returns an error with file and line.
func (p *bindingsParser) fail(at int64, format string, args ...any) error {
	line := 1 + bytes.Count(p.text[:min(int(at), len(p.text))], []byte{'\n'})
	return fmt.Errorf("%s:%d: %w", p.file, line, fmt.Errorf("%w: "+format, append([]any{ErrBinding}, args...)...))
}

// next reads a token. Syntax errors contain the line.
func (p *bindingsParser) next() (jsontext.Token, error) {
	t, err := p.dec.ReadToken()
	var s *jsontext.SyntacticError
	switch {
	case err == nil:
		return t, nil
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return t, p.fail(int64(len(p.text)), "unexpected end of file")
	case errors.As(err, &s):
		return t, p.fail(s.ByteOffset, "%w", s.Err)
	}
	return t, p.fail(p.dec.InputOffset(), "%w", err)
}

func (p *bindingsParser) expect(kind jsontext.Kind, what string) error {
	t, err := p.next()
	if err == nil && t.Kind() != kind {
		err = p.fail(p.dec.InputOffset(), "want %s", what)
	}
	return err
}

// whole parses the file.
func (p *bindingsParser) whole() error {
	if err := p.expect('{', "an object with bindings"); err != nil {
		return err
	}
	found := false
	for p.dec.PeekKind() != '}' {
		key, err := p.next()
		if err != nil {
			return err
		}
		if key.Kind() != '"' || key.String() != "bindings" {
			return p.fail(p.dec.InputOffset(), "%q: want one list named bindings", key)
		}
		found = true
		if err := p.expect('[', "a list of bindings"); err != nil {
			return err
		}
		for p.dec.PeekKind() != ']' {
			if err := p.binding(); err != nil {
				return err
			}
		}
		if _, err := p.next(); err != nil {
			return err
		}
	}
	if _, err := p.next(); err != nil {
		return err
	}
	if !found {
		return p.fail(p.dec.InputOffset(), "list bindings is missing: an empty list is \"bindings\": []")
	}
	if _, err := p.dec.ReadToken(); !errors.Is(err, io.EOF) {
		return p.fail(p.dec.InputOffset(), "unexpected data after the end")
	}
	return nil
}

func (p *bindingsParser) binding() error {
	if err := p.expect('{', "a binding: an object with label, prefix, port and protocol"); err != nil {
		return err
	}
	var f fileBinding
	for p.dec.PeekKind() != '}' {
		key, err := p.next()
		if err != nil {
			return err
		}
		name := key.String()
		value, err := p.next()
		if err != nil {
			return err
		}
		want := jsontext.Kind('"')
		switch name {
		case "label":
			f.label = value.String()
		case "prefix":
			f.prefix = value.String()
		case "protocol":
			f.protocol = value.String()
		case "port":
			want = '0'
			port, err := strconv.ParseUint(value.String(), 10, 16)
			if err != nil {
				return p.fail(p.dec.InputOffset(), "port %s: want a number from 0 to 65535, 0 for every port", value)
			}
			f.port = uint16(port)
		default:
			return p.fail(p.dec.InputOffset(), "%q: want label, prefix, port and protocol", name)
		}
		if value.Kind() != want {
			return p.fail(p.dec.InputOffset(), "%s: %s has the wrong type", name, value)
		}
	}
	if _, err := p.next(); err != nil {
		return err
	}
	return p.add(f, p.dec.InputOffset())
}

// add adds a binding that ends at an offset.
func (p *bindingsParser) add(f fileBinding, at int64) error {
	if err := checkLabel(f.label); err != nil {
		return p.fail(at, "label: %w", err)
	}
	prefix, err := ParsePrefix(f.prefix)
	if err == nil {
		err = CheckUnicast(prefix)
	}
	if err != nil {
		return p.fail(at, "prefix: %s", strings.TrimPrefix(err.Error(), ErrBinding.Error()+": "))
	}
	protos := []Proto{unix.IPPROTO_TCP, unix.IPPROTO_UDP}
	switch f.protocol {
	case "":
	case "tcp":
		protos = protos[:1]
	case "udp":
		protos = protos[1:]
	default:
		return p.fail(at, "protocol %q: want tcp or udp, or none for both", f.protocol)
	}
	for _, proto := range protos {
		p.out = append(p.out, Binding{Service: f.label, Prefix: prefix, Port: f.port, Proto: proto})
		p.ends = append(p.ends, at)
	}
	return nil
}

// once returns the bindings sorted and without duplicates, so callers can compare them cheaply. A conflict of two
// services is an error.
func (p *bindingsParser) once() ([]Binding, error) {
	order := bindingsInOrder(p.out)
	out := make([]Binding, 0, len(order))
	for i, o := range order {
		b := p.out[o.at]
		if i == 0 || o.compare(order[i-1]) != 0 {
			out = append(out, b)
		} else if first := out[len(out)-1]; first.Service != b.Service {
			return nil, p.fail(p.ends[o.at], "%s %s port %d is bound to %s above, and to %s here", b.Proto, b.Prefix, b.Port, first.Service, b.Service)
		}
	}
	return out, nil
}
