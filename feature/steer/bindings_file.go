// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// fileBinding is a binding as tubular writes it: without a protocol it is for both,
// without a port for every one.
type fileBinding struct {
	Label    string `json:"label"`
	Prefix   string `json:"prefix"`
	Port     uint16 `json:"port"`
	Protocol string `json:"protocol"`
}

// LoadBindingsFile reads a file of bindings; "-" is standard input.
func LoadBindingsFile(path string) ([]Binding, error) {
	if path == "-" {
		text, err := io.ReadAll(os.Stdin)
		if err != nil {
			return nil, err
		}
		return ParseBindings("standard input", text)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	return ParseBindings(path, text)
}

// ParseBindings reads {"bindings": [{"label", "prefix", "port", "protocol"}, …]}.
// Errors name file and line.
func ParseBindings(file string, text []byte) ([]Binding, error) {
	p := bindingsParser{file: file, text: text}
	var ok bool
	if p.out, p.ends, ok = quickBindings(text); !ok {
		p.out, p.ends = nil, nil
		p.dec = json.NewDecoder(bytes.NewReader(text))
		p.dec.DisallowUnknownFields()
		if err := p.whole(); err != nil {
			return nil, err
		}
	}
	return p.once()
}

type bindingsParser struct {
	file  string
	text  []byte
	dec   *json.Decoder
	begun int64 // where what is being read begins
	out   []Binding
	ends  []int64 // where each of them ends
}

// fail names the line.
func (p *bindingsParser) fail(at int64, format string, args ...any) error {
	line := 1 + bytes.Count(p.text[:min(int(at), len(p.text))], []byte{'\n'})
	return fmt.Errorf("%s:%d: %w", p.file, line, fmt.Errorf("%w: "+format, append([]any{ErrBinding}, args...)...))
}

func (p *bindingsParser) whole() error {
	if err := p.expect(json.Delim('{'), "an object with bindings"); err != nil {
		return err
	}
	found := false
	for p.dec.More() {
		key, err := p.dec.Token()
		if err != nil {
			return p.syntax(err)
		}
		if key != "bindings" || found {
			return p.fail(p.dec.InputOffset(), "%q: want one list, called bindings", key)
		}
		found = true
		if err := p.expect(json.Delim('['), "a list of bindings"); err != nil {
			return err
		}
		for p.dec.More() {
			if err := p.binding(); err != nil {
				return err
			}
		}
		if _, err := p.dec.Token(); err != nil {
			return p.syntax(err)
		}
	}
	if _, err := p.dec.Token(); err != nil {
		return p.syntax(err)
	}
	if !found {
		return p.fail(p.dec.InputOffset(), "there is no list called bindings: an empty one is \"bindings\": []")
	}
	if _, err := p.dec.Token(); !errors.Is(err, io.EOF) {
		return p.fail(p.dec.InputOffset(), "something follows the end")
	}
	return nil
}

func (p *bindingsParser) expect(want json.Delim, what string) error {
	t, err := p.dec.Token()
	if err != nil {
		return p.syntax(err)
	}
	if t != want {
		return p.fail(p.dec.InputOffset(), "want %s", what)
	}
	return nil
}

func (p *bindingsParser) syntax(err error) error {
	at := p.dec.InputOffset()
	var s *json.SyntaxError
	var u *json.UnmarshalTypeError
	switch {
	case errors.As(err, &s):
		at = s.Offset
	case errors.As(err, &u):
		return p.fail(p.begun+u.Offset, "%s: %s does not fit", u.Field, u.Value)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return p.fail(int64(len(p.text)), "the file ends too soon")
	}
	return p.fail(at, "%s", err)
}

func (p *bindingsParser) binding() error {
	p.begun = p.dec.InputOffset()
	var f fileBinding
	if err := p.dec.Decode(&f); err != nil {
		return p.syntax(err)
	}
	return p.add(f, p.dec.InputOffset())
}

// add takes a binding that ends at an offset.
func (p *bindingsParser) add(f fileBinding, at int64) error {
	if _, err := keyOfLabel(f.Label); err != nil {
		return p.fail(at, "label %q: want 1 to %d bytes", f.Label, MaxLabel)
	}
	prefix, err := ParsePrefix(f.Prefix)
	if err != nil {
		return p.fail(at, "prefix %q is no address and no prefix", f.Prefix)
	}
	protos := []Proto{unix.IPPROTO_TCP, unix.IPPROTO_UDP}
	switch f.Protocol {
	case "":
	case "tcp":
		protos = protos[:1]
	case "udp":
		protos = protos[1:]
	default:
		return p.fail(at, "protocol %q: want tcp or udp, or none for both", f.Protocol)
	}
	for _, proto := range protos {
		p.out = append(p.out, Binding{Service: f.Label, Prefix: prefix, Port: f.Port, Proto: proto})
		p.ends = append(p.ends, at)
	}
	return nil
}

// once drops what is there twice, and finds what is bound to two services.
func (p *bindingsParser) once() ([]Binding, error) {
	order := bindingsInOrder(p.out)
	twice := map[int32]bool{}
	for i := 1; i < len(order); i++ {
		if order[i].compare(order[i-1]) != 0 {
			continue
		}
		first, b := p.out[order[i-1].at], p.out[order[i].at]
		if first.Service != b.Service {
			return nil, p.fail(p.ends[order[i].at], "%s %s port %d is bound to %s above, and to %s here", b.Proto, b.Prefix, b.Port, first.Service, b.Service)
		}
		twice[order[i].at] = true
	}
	if len(twice) == 0 {
		return p.out, nil
	}
	out := p.out[:0]
	for i, b := range p.out {
		if !twice[int32(i)] {
			out = append(out, b)
		}
	}
	return out, nil
}
