// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"encoding/binary"
	"fmt"
)

// Message is one message. All have the same layout; what a type does not use is
// zero.
type Message struct {
	Version uint8 // 0: Version, when sent
	Type    Type
	Flags   Flags
	Seq     uint32 // of a request that wants an answer, and of its answer; else 0
	Session uint64 // the socket's cookie (SO_COOKIE)
	Read    uint64 // bytes of the stream that the state accounts for, since the connection began
	Written uint64 // the same of the other direction
	Number  uint32
	Name    string
	Text    string
	State   []byte
}

// Append appends the message's bytes, all numbers little-endian.
func (m *Message) Append(b []byte) ([]byte, error) {
	switch {
	case len(m.Name) > MaxName:
		return b, fmt.Errorf("%w: a name of %d bytes; at most %d", ErrMalformed, len(m.Name), MaxName)
	case len(m.Text) > MaxText:
		return b, fmt.Errorf("%w: a text of %d bytes; at most %d", ErrMalformed, len(m.Text), MaxText)
	case len(m.State) > MaxInline:
		return b, fmt.Errorf("%w: a state of %d bytes in a message; at most %d, larger ones go in a memfd", ErrMalformed, len(m.State), MaxInline)
	}
	version := m.Version
	if version == 0 {
		version = Version
	}
	b = append(b, version, byte(m.Type))
	b = binary.LittleEndian.AppendUint16(b, uint16(m.Flags))
	b = binary.LittleEndian.AppendUint32(b, m.Seq)
	b = binary.LittleEndian.AppendUint64(b, m.Session)
	b = binary.LittleEndian.AppendUint64(b, m.Read)
	b = binary.LittleEndian.AppendUint64(b, m.Written)
	b = binary.LittleEndian.AppendUint32(b, m.Number)
	b = append(b, byte(len(m.Name)), 0)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(m.Text)))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(m.State)))
	b = append(b, 0, 0, 0, 0)
	b = append(b, m.Name...)
	b = append(b, m.Text...)
	return append(b, m.State...), nil
}

// Parse reads a message, which must be all of b. Its State is a part of b. What it
// does not know is no error: flags, types and a version of later clients are the
// receiver's to judge. The error wraps [ErrMalformed].
func Parse(b []byte) (Message, error) {
	if len(b) < HeaderSize {
		return Message{}, fmt.Errorf("%w: %d bytes, the header alone has %d", ErrMalformed, len(b), HeaderSize)
	}
	m := Message{
		Version: b[0],
		Type:    Type(b[1]),
		Flags:   Flags(binary.LittleEndian.Uint16(b[2:])),
		Seq:     binary.LittleEndian.Uint32(b[4:]),
		Session: binary.LittleEndian.Uint64(b[8:]),
		Read:    binary.LittleEndian.Uint64(b[16:]),
		Written: binary.LittleEndian.Uint64(b[24:]),
		Number:  binary.LittleEndian.Uint32(b[32:]),
	}
	name, text, state := int(b[36]), int(binary.LittleEndian.Uint16(b[38:])), binary.LittleEndian.Uint32(b[40:])
	rest := b[HeaderSize:]
	switch {
	case m.Version == 0:
		return Message{}, fmt.Errorf("%w: version 0", ErrMalformed)
	case name > MaxName, text > MaxText, state > MaxInline:
		return Message{}, fmt.Errorf("%w: a name of %d bytes, a text of %d, a state of %d; at most %d, %d and %d", ErrMalformed, name, text, state, MaxName, MaxText, MaxInline)
	case len(rest) != name+text+int(state):
		return Message{}, fmt.Errorf("%w: %d bytes follow the header, which announces %d", ErrMalformed, len(rest), name+text+int(state))
	}
	m.Name, m.Text = string(rest[:name]), string(rest[name:name+text])
	if state > 0 {
		m.State = rest[name+text:]
	}
	return m, nil
}

// Err is the error that an Error message carries, nil for other messages.
func (m *Message) Err() error {
	if m.Type != Error {
		return nil
	}
	return &CodeError{Code(m.Number), m.Text}
}

// ValidName says whether a service or a member may have this name: 1 to 63 bytes of
// printable ASCII without spaces, so that it needs no quotes anywhere.
func ValidName(s string) bool {
	if len(s) == 0 || len(s) > MaxName {
		return false
	}
	for i := range len(s) {
		if s[i] <= ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}
