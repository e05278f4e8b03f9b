// SPDX-License-Identifier: Apache-2.0

package ipfix

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
)

// Versions of the two protocols with templates.
const (
	NetFlow9 = 9  // RFC 3954
	IPFIX    = 10 // RFC 7011
)

// Bounds of one template. A longer one would need a fragmented datagram, and fragments are ignored.
const (
	MaxTemplateBytes = 2048
	MinTemplateID    = 256
	variableLength   = 0xffff // RFC 7011, section 7
)

// ErrMalformed is wrapped by every parse error.
var ErrMalformed = errors.New("malformed")

// Header is the header of an IPFIX message or NetFlow v9 packet.
type Header struct {
	Version    uint16 // 9 or 10
	Domain     uint32 // observation domain, or source id
	Sequence   uint32
	ExportTime uint32 // seconds since the epoch
	Uptime     uint32 // NetFlow v9: milliseconds
}

// Template is a template record as sent by its exporter.
type Template struct {
	ID      uint16
	Options bool
	Record  []byte // including its header
}

// Withdrawal withdraws templates (RFC 7011, section 8.1).
type Withdrawal struct {
	ID  uint16
	All bool // every template, or options template, of the domain; ID is 2 or 3
}

// Change is one new template, or one withdrawal.
type Change struct {
	Template  *Template
	Withdrawn *Withdrawal
}

// Set is a set: its number, which is the template's for data, and its length in bytes with the
// header.
type Set struct {
	ID, Length uint16

	body []byte
}

// Body returns the set without its header. It shares the message's bytes.
func (s Set) Body() []byte { return s.body }

// Message is the parsed content of one message.
type Message struct {
	Header
	Changes []Change // in their order; the records share the message's bytes
	Sets    []Set
}

// Parse parses a datagram. It is strict: sets must fill the message to the last byte, so packets of
// other protocols are not mistaken for templates.
func Parse(b []byte) (m Message, err error) {
	var sets []byte
	if m.Header, sets, err = parseFlowHeader(b); err != nil {
		return m, err
	}
	for len(sets) > 0 {
		if m.Version == NetFlow9 && len(sets) < 4 && allZero(sets) {
			break // padding
		}
		if len(sets) < 4 {
			return m, fmt.Errorf("%w: %d bytes behind the last set", ErrMalformed, len(sets))
		}
		id, size := binary.BigEndian.Uint16(sets), binary.BigEndian.Uint16(sets[2:])
		if size < 4 || int(size) > len(sets) {
			return m, fmt.Errorf("%w: set of %d bytes, but %d are left", ErrMalformed, size, len(sets))
		}
		body := sets[4:size]
		sets = sets[size:]
		if options, ok := setKind(m.Version, id); ok {
			if m.Changes, err = appendRecords(m.Changes, m.Version, options, body); err != nil {
				return m, err
			}
		} else if id < MinTemplateID {
			return m, fmt.Errorf("%w: invalid set number %d", ErrMalformed, id)
		}
		m.Sets = append(m.Sets, Set{ID: id, Length: size, body: body})
	}
	return m, nil
}

func allZero(b []byte) bool {
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}

func parseFlowHeader(b []byte) (h Header, sets []byte, err error) {
	u32 := func(at int) uint32 { return binary.BigEndian.Uint32(b[at:]) }
	if len(b) < 16 {
		return h, nil, fmt.Errorf("%w: %d bytes", ErrMalformed, len(b))
	}
	h.Version = binary.BigEndian.Uint16(b)
	switch {
	case h.Version == IPFIX && int(binary.BigEndian.Uint16(b[2:])) == len(b):
		h.ExportTime, h.Sequence, h.Domain = u32(4), u32(8), u32(12)
		return h, b[16:], nil
	case h.Version == NetFlow9 && len(b) >= 20:
		h.Uptime, h.ExportTime, h.Sequence, h.Domain = u32(4), u32(8), u32(12), u32(16)
		return h, b[20:], nil
	}
	return h, nil, fmt.Errorf("%w: version %d in %d bytes", ErrMalformed, h.Version, len(b))
}

// setKind reports whether a set contains options templates (options), and whether it contains
// templates at all (ok).
func setKind(version, id uint16) (options, ok bool) {
	base := uint16(0)
	if version == IPFIX {
		base = 2
	}
	return id == base+1, id == base || id == base+1
}

// SetID returns the set id of templates or options templates in a version.
func SetID(version uint16, options bool) uint16 {
	id := uint16(0)
	if version == IPFIX {
		id = 2
	}
	if options {
		id++
	}
	return id
}

// appendRecords parses the records of one set of templates.
func appendRecords(out []Change, version uint16, options bool, b []byte) ([]Change, error) {
	// A rest shorter than a record, or beginning with zero, is padding.
	for len(b) >= 4 && binary.BigEndian.Uint16(b) != 0 {
		id := binary.BigEndian.Uint16(b)
		if version == IPFIX && binary.BigEndian.Uint16(b[2:]) == 0 {
			all := id == SetID(version, options)
			if !all && id < MinTemplateID {
				return nil, fmt.Errorf("%w: a withdrawal of %d", ErrMalformed, id)
			}
			out = append(out, Change{Withdrawn: &Withdrawal{ID: id, All: all}})
			b = b[4:]
			continue
		}
		n, err := recordLength(version, options, b)
		if err != nil {
			return nil, err
		}
		out = append(out, Change{Template: &Template{ID: id, Options: options, Record: b[:n:n]}})
		b = b[n:]
	}
	return out, nil
}

// recordLength checks the template record at the start of b and returns its length.
func recordLength(version uint16, options bool, b []byte) (int, error) {
	id := binary.BigEndian.Uint16(b)
	if id < MinTemplateID {
		return 0, fmt.Errorf("%w: invalid template number %d", ErrMalformed, id)
	}
	at, fields, err := recordFields(version, options, b)
	if err != nil {
		return 0, err
	}
	for range fields {
		if at+4 > len(b) {
			return 0, fmt.Errorf("%w: template %d is cut off", ErrMalformed, id)
		}
		if version == IPFIX && b[at]&0x80 != 0 { // an enterprise number follows
			at += 4
		}
		at += 4
	}
	switch {
	case at > len(b):
		return 0, fmt.Errorf("%w: template %d is cut off", ErrMalformed, id)
	case fields == 0 || at > MaxTemplateBytes:
		return 0, fmt.Errorf("%w: template %d has %d fields", ErrMalformed, id, fields)
	}
	return at, nil
}

// recordFields returns the offset and the number of a record's fields.
func recordFields(version uint16, options bool, b []byte) (at, fields int, err error) {
	second := int(binary.BigEndian.Uint16(b[2:]))
	switch {
	case !options:
		return 4, second, nil
	case len(b) < 6:
		return 0, 0, fmt.Errorf("%w: an options template of %d bytes", ErrMalformed, len(b))
	}
	third := int(binary.BigEndian.Uint16(b[4:]))
	if version == IPFIX { // number of fields, then number of scope fields
		if third == 0 || third > second {
			return 0, 0, fmt.Errorf("%w: %d of %d fields are scope", ErrMalformed, third, second)
		}
		return 6, second, nil
	}
	if second%4 != 0 || third%4 != 0 { // bytes of scope, bytes of options
		return 0, 0, fmt.Errorf("%w: an options template of %d and %d bytes", ErrMalformed, second, third)
	}
	return 6, (second + third) / 4, nil
}

// DataLength returns the length of a data record of the template in bytes, 0 if it varies.
func (t Template) DataLength(version uint16) int {
	at, fields, err := recordFields(version, t.Options, t.Record)
	if err != nil {
		return 0 // checked by Parse
	}
	sum := 0
	for range fields {
		if at+4 > len(t.Record) {
			return 0
		}
		n := int(binary.BigEndian.Uint16(t.Record[at+2:]))
		if version == IPFIX && n == variableLength {
			return 0
		}
		sum += n
		if version == IPFIX && t.Record[at]&0x80 != 0 {
			at += 4
		}
		at += 4
	}
	return sum
}

// Encode returns one message with templates.
func Encode(h Header, templates []Template) []byte {
	w := Begin(nil, h)
	for _, options := range []bool{false, true} {
		w.Templates(options, templates...)
	}
	return w.End()
}

// Fields returns the fields of a template. Enterprise fields have number 0.
func (t Template) Fields(version uint16) (out []Field) {
	at, fields, err := recordFields(version, t.Options, t.Record)
	if err != nil {
		return nil // checked by Parse
	}
	for range fields {
		if at+4 > len(t.Record) {
			return nil
		}
		f := Field{be.Uint16(t.Record[at:]), be.Uint16(t.Record[at+2:])}
		if at += 4; version == IPFIX && f.ID&0x8000 != 0 {
			f.ID = 0
			at += 4
		}
		out = append(out, f)
	}
	return out
}

// Equal reports whether two templates have the same record.
func (t Template) Equal(o Template) bool {
	return t.ID == o.ID && t.Options == o.Options && bytes.Equal(t.Record, o.Record)
}
