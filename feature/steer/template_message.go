// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// Versions of the two protocols that have templates.
const (
	netflow9 = 9  // RFC 3954
	ipfix    = 10 // RFC 7011
)

// Bounds of one template: a longer one does not fit a datagram that is not
// fragmented, and fragments are not looked at.
const (
	maxTemplateBytes = 2048
	minTemplateID    = 256
	variableLength   = 0xffff // RFC 7011, section 7
)

// errMessage is wrapped by every error about a message that cannot be read.
var errMessage = errors.New("malformed")

// flowHeader is the header of an IPFIX message or NetFlow v9 packet.
type flowHeader struct {
	Version    uint16 // 9 or 10
	Domain     uint32 // observation domain, or source id
	Sequence   uint32
	ExportTime uint32 // seconds since the epoch
	Uptime     uint32 // NetFlow v9: milliseconds
}

// template is one template record as its exporter sent it.
type template struct {
	ID      uint16
	Options bool
	Record  []byte // with its header
}

// withdrawal takes templates back (RFC 7011, section 8.1).
type withdrawal struct {
	ID  uint16
	All bool // every template, or options template, of the domain: ID is 2 or 3
}

// templateChange is one template learnt, or some withdrawn.
type templateChange struct {
	template  *template
	withdrawn *withdrawal
}

// flowSet is a set: its number, which for data is the template's, and its
// length in bytes with its header.
type flowSet struct{ ID, Length uint16 }

// flowMessage is what matters here of one message.
type flowMessage struct {
	flowHeader
	Changes []templateChange // in their order; their records share the message's bytes
	Sets    []flowSet
}

// parseTemplates reads a datagram. It is strict: sets must fill the message to
// the last byte, so that other protocols' packets are not taken for templates.
func parseTemplates(b []byte) (m flowMessage, err error) {
	var sets []byte
	if m.flowHeader, sets, err = parseFlowHeader(b); err != nil {
		return m, err
	}
	for len(sets) > 0 {
		if m.Version == netflow9 && len(sets) < 4 && allZero(sets) {
			break // padding
		}
		if len(sets) < 4 {
			return m, fmt.Errorf("%w: %d bytes behind the last set", errMessage, len(sets))
		}
		id, size := binary.BigEndian.Uint16(sets), binary.BigEndian.Uint16(sets[2:])
		if size < 4 || int(size) > len(sets) {
			return m, fmt.Errorf("%w: a set of %d bytes where %d are left", errMessage, size, len(sets))
		}
		body := sets[4:size]
		sets = sets[size:]
		if options, ok := setKind(m.Version, id); ok {
			if m.Changes, err = appendRecords(m.Changes, m.Version, options, body); err != nil {
				return m, err
			}
		} else if id < minTemplateID {
			return m, fmt.Errorf("%w: no set has the number %d", errMessage, id)
		}
		m.Sets = append(m.Sets, flowSet{id, size})
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

func parseFlowHeader(b []byte) (h flowHeader, sets []byte, err error) {
	u32 := func(at int) uint32 { return binary.BigEndian.Uint32(b[at:]) }
	if len(b) < 16 {
		return h, nil, fmt.Errorf("%w: %d bytes", errMessage, len(b))
	}
	h.Version = binary.BigEndian.Uint16(b)
	switch {
	case h.Version == ipfix && int(binary.BigEndian.Uint16(b[2:])) == len(b):
		h.ExportTime, h.Sequence, h.Domain = u32(4), u32(8), u32(12)
		return h, b[16:], nil
	case h.Version == netflow9 && len(b) >= 20:
		h.Uptime, h.ExportTime, h.Sequence, h.Domain = u32(4), u32(8), u32(12), u32(16)
		return h, b[20:], nil
	}
	return h, nil, fmt.Errorf("%w: version %d in %d bytes", errMessage, h.Version, len(b))
}

// setKind says whether a set holds templates, and options templates.
func setKind(version, id uint16) (options, ok bool) {
	base := uint16(0)
	if version == ipfix {
		base = 2
	}
	return id == base+1, id == base || id == base+1
}

func setID(version uint16, options bool) uint16 {
	id := uint16(0)
	if version == ipfix {
		id = 2
	}
	if options {
		id++
	}
	return id
}

// appendRecords reads the records of one set of templates.
func appendRecords(out []templateChange, version uint16, options bool, b []byte) ([]templateChange, error) {
	// What is shorter than a record, or begins with a zero, pads the set.
	for len(b) >= 4 && binary.BigEndian.Uint16(b) != 0 {
		id := binary.BigEndian.Uint16(b)
		if version == ipfix && binary.BigEndian.Uint16(b[2:]) == 0 {
			all := id == setID(version, options)
			if !all && id < minTemplateID {
				return nil, fmt.Errorf("%w: a withdrawal of %d", errMessage, id)
			}
			out = append(out, templateChange{withdrawn: &withdrawal{ID: id, All: all}})
			b = b[4:]
			continue
		}
		n, err := recordLength(version, options, b)
		if err != nil {
			return nil, err
		}
		out = append(out, templateChange{template: &template{ID: id, Options: options, Record: b[:n:n]}})
		b = b[n:]
	}
	return out, nil
}

// recordLength checks the template record that b begins with and returns how
// long it is.
func recordLength(version uint16, options bool, b []byte) (int, error) {
	id := binary.BigEndian.Uint16(b)
	if id < minTemplateID {
		return 0, fmt.Errorf("%w: no template has the number %d", errMessage, id)
	}
	at, fields, err := recordFields(version, options, b)
	if err != nil {
		return 0, err
	}
	for range fields {
		if at+4 > len(b) {
			return 0, fmt.Errorf("%w: template %d is cut off", errMessage, id)
		}
		if version == ipfix && b[at]&0x80 != 0 { // an enterprise number follows
			at += 4
		}
		at += 4
	}
	switch {
	case at > len(b):
		return 0, fmt.Errorf("%w: template %d is cut off", errMessage, id)
	case fields == 0 || at > maxTemplateBytes:
		return 0, fmt.Errorf("%w: template %d has %d fields", errMessage, id, fields)
	}
	return at, nil
}

// recordFields returns where a record's fields begin, and their number.
func recordFields(version uint16, options bool, b []byte) (at, fields int, err error) {
	second := int(binary.BigEndian.Uint16(b[2:]))
	switch {
	case !options:
		return 4, second, nil
	case len(b) < 6:
		return 0, 0, fmt.Errorf("%w: an options template of %d bytes", errMessage, len(b))
	}
	third := int(binary.BigEndian.Uint16(b[4:]))
	if version == ipfix { // all fields, then how many of them are scope
		if third == 0 || third > second {
			return 0, 0, fmt.Errorf("%w: %d of %d fields are scope", errMessage, third, second)
		}
		return 6, second, nil
	}
	if second%4 != 0 || third%4 != 0 { // bytes of scope, bytes of options
		return 0, 0, fmt.Errorf("%w: an options template of %d and %d bytes", errMessage, second, third)
	}
	return 6, (second + third) / 4, nil
}

// dataLength is the length of a data record of the template in bytes, 0 where
// it varies.
func (t template) dataLength(version uint16) int {
	at, fields, err := recordFields(version, t.Options, t.Record)
	if err != nil {
		return 0 // it was checked when it was learnt
	}
	sum := 0
	for range fields {
		if at+4 > len(t.Record) {
			return 0
		}
		n := int(binary.BigEndian.Uint16(t.Record[at+2:]))
		if version == ipfix && n == variableLength {
			return 0
		}
		sum += n
		if version == ipfix && t.Record[at]&0x80 != 0 {
			at += 4
		}
		at += 4
	}
	return sum
}

// replayMessages carries templates in messages of at most limit bytes each,
// more only where one template alone needs them. next is the sequence number
// that the exporter's next message will have: after the replay a collector
// expects just that.
func replayMessages(h flowHeader, next uint32, templates []template, limit int) [][]byte {
	var parts [][]template
	size := 0
	for _, t := range templates {
		need := len(t.Record)
		if n := len(parts); n == 0 || size+need+2*4 > limit-20 {
			parts = append(parts, nil)
			size = 0
		}
		parts[len(parts)-1] = append(parts[len(parts)-1], t)
		size += need
	}
	var out [][]byte
	for i, p := range parts {
		h.Sequence = next // templates are no data records, so IPFIX does not count on
		if h.Version == netflow9 {
			h.Sequence = next - uint32(len(parts)-i)
		}
		out = append(out, encodeTemplates(h, p))
	}
	return out
}

// encodeTemplates is one message that carries templates.
func encodeTemplates(h flowHeader, templates []template) []byte {
	be := binary.BigEndian
	b := be.AppendUint16(nil, h.Version)
	if h.Version == ipfix {
		b = be.AppendUint16(b, 0) // length, below
	} else {
		b = be.AppendUint16(b, uint16(len(templates)))
		b = be.AppendUint32(b, h.Uptime)
	}
	b = be.AppendUint32(b, h.ExportTime)
	b = be.AppendUint32(b, h.Sequence)
	b = be.AppendUint32(b, h.Domain)
	for _, options := range []bool{false, true} {
		set := len(b)
		for _, t := range templates {
			if t.Options != options {
				continue
			}
			if len(b) == set {
				b = be.AppendUint32(b, uint32(setID(h.Version, options))<<16)
			}
			b = append(b, t.Record...)
		}
		if len(b) > set {
			if h.Version == netflow9 {
				for len(b)%4 != 0 { // an options record has a header of 6 bytes
					b = append(b, 0)
				}
			}
			be.PutUint16(b[set+2:], uint16(len(b)-set))
		}
	}
	if h.Version == ipfix {
		be.PutUint16(b[2:], uint16(len(b)))
	}
	return b
}
