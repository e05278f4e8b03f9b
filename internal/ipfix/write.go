// SPDX-License-Identifier: Apache-2.0

package ipfix

import "encoding/binary"

var be = binary.BigEndian

// Field is a field of a template: its number in the IANA registry of information elements, and its length in bytes.
type Field struct{ ID, Length uint16 }

// NewTemplate returns a template with these fields, for both protocols.
func NewTemplate(id uint16, fields ...Field) Template {
	b := be.AppendUint16(make([]byte, 0, 4+4*len(fields)), id)
	b = be.AppendUint16(b, uint16(len(fields)))
	for _, f := range fields {
		b = be.AppendUint16(b, f.ID)
		b = be.AppendUint16(b, f.Length)
	}
	return Template{ID: id, Record: b}
}

// Writer appends one message to existing bytes. It is a value, and only the bytes are allocated.
type Writer struct {
	b       []byte
	version uint16
	start   int // of the message in b
	records int // templates and data records, for the header of NetFlow v9
}

// Begin starts a message and appends it to b. b may be nil.
func Begin(b []byte, h Header) Writer {
	w := Writer{version: h.Version, start: len(b)}
	b = be.AppendUint16(b, h.Version)
	b = be.AppendUint16(b, 0) // length, or number of records: see End
	if h.Version == NetFlow9 {
		b = be.AppendUint32(b, h.Uptime)
	}
	b = be.AppendUint32(b, h.ExportTime)
	b = be.AppendUint32(b, h.Sequence)
	w.b = be.AppendUint32(b, h.Domain)
	return w
}

// Templates appends a set of the templates in all, or of its options templates. Without any it
// appends nothing.
func (w *Writer) Templates(options bool, all ...Template) {
	set := len(w.b)
	for _, t := range all {
		if t.Options != options {
			continue
		}
		if len(w.b) == set {
			w.b = be.AppendUint32(w.b, uint32(SetID(w.version, options))<<16)
		}
		w.b = append(w.b, t.Record...)
		w.records++
	}
	w.end(set)
}

// Data appends a set of data records of a template. add appends record i to b.
func (w *Writer) Data(template uint16, records int, add func(b []byte, i int) []byte) {
	if records == 0 {
		return
	}
	set := len(w.b)
	w.b = be.AppendUint32(w.b, uint32(template)<<16)
	for i := range records {
		w.b = add(w.b, i)
	}
	w.records += records
	w.end(set)
}

// end writes the length of the set beginning at an offset. Sets of NetFlow v9 are padded to 32 bits
// (RFC 3954, section 5.3).
func (w *Writer) end(set int) {
	if len(w.b) == set {
		return
	}
	for w.version == NetFlow9 && (len(w.b)-set)%4 != 0 {
		w.b = append(w.b, 0)
	}
	be.PutUint16(w.b[set+2:], uint16(len(w.b)-set))
}

// End returns the bytes including the whole message.
func (w *Writer) End() []byte {
	n := w.records
	if w.version == IPFIX {
		n = len(w.b) - w.start
	}
	be.PutUint16(w.b[w.start+2:], uint16(n))
	return w.b
}
