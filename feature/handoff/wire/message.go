// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"strings"
)

// Message is one message. All types have the same layout. Unused fields are zero.
type Message struct {
	Version uint8 // 0: the package's Version, when sent
	Type    Type
	Flags   Flags
	Seq     uint32 // of a request with an answer, and of its answer; else 0
	Session uint64 // the socket's cookie (SO_COOKIE)
	Read    uint64 // bytes read from the receive queue since the connection began: first the ones included in State, then Unread
	Written uint64 // bytes written to the send queue, as included in State
	Number  uint32
	Name    string
	Text    string
	State   []byte
	Sizes   [2]uint64 // with StateFD: lengths of State and Unread, consecutive in the memfd; see Fetch
	Cut     bool      // as received: its descriptors are missing, because this process has none left
	Unread  []byte    // bytes read from the receive queue and not included in State: the next owner reads them first
}

// Append appends the message's bytes. All numbers are little-endian.
func (m *Message) Append(b []byte) ([]byte, error) {
	switch {
	case len(m.Name) > MaxName:
		return b, fmt.Errorf("%w: a name of %d bytes; at most %d", ErrMalformed, len(m.Name), MaxName)
	case len(m.Text) > MaxText:
		return b, fmt.Errorf("%w: a text of %d bytes; at most %d", ErrMalformed, len(m.Text), MaxText)
	case len(m.State)+len(m.Unread) > MaxInline:
		return b, fmt.Errorf("%w: %d bytes of state and unread in a message; at most %d, more go in a memfd", ErrMalformed, len(m.State)+len(m.Unread), MaxInline)
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
	state, unread := uint64(len(m.State)), uint64(len(m.Unread))
	if m.Flags&StateFD != 0 {
		if state+unread > 0 {
			return b, fmt.Errorf("%w: a state in the message and in a memfd", ErrMalformed)
		}
		state, unread = m.Sizes[0], m.Sizes[1]
	}
	b = binary.LittleEndian.AppendUint32(b, uint32(state))
	b = binary.LittleEndian.AppendUint32(b, uint32(unread))
	b = append(b, m.Name...)
	b = append(b, m.Text...)
	b = append(b, m.State...)
	return append(b, m.Unread...), nil
}

// parse parses a message, which must be all of b. State and Unread are slices of b. Unknown flags,
// types and versions of later clients are no error, but left to the receiver. The error wraps
// [ErrMalformed].
func parse(b []byte) (Message, error) {
	if len(b) < headerSize {
		return Message{}, fmt.Errorf("%w: %d bytes, the header alone has %d", ErrMalformed, len(b), headerSize)
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
	name, text := int(b[36]), int(binary.LittleEndian.Uint16(b[38:]))
	state, unread := uint64(binary.LittleEndian.Uint32(b[40:])), uint64(binary.LittleEndian.Uint32(b[44:]))
	if m.Flags&StateFD != 0 {
		// The lengths are of the memfd's content.
		m.Sizes = [2]uint64{state, unread}
		state, unread = 0, 0
	}
	rest := b[headerSize:]
	switch {
	case m.Version == 0:
		return Message{}, fmt.Errorf("%w: version 0", ErrMalformed)
	case name > MaxName, text > MaxText, state+unread > MaxInline:
		return Message{}, fmt.Errorf("%w: a name of %d bytes, a text of %d, state and unread of %d; at most %d, %d and %d", ErrMalformed, name, text, state+unread, MaxName, MaxText, MaxInline)
	case uint64(len(rest)) != uint64(name+text)+state+unread:
		return Message{}, fmt.Errorf("%w: %d bytes follow the header, which announces %d", ErrMalformed, len(rest), uint64(name+text)+state+unread)
	}
	m.Name, m.Text = string(rest[:name]), string(rest[name:name+text])
	rest = rest[name+text:]
	if state > 0 {
		m.State = rest[:state:state]
	}
	if unread > 0 {
		m.Unread = rest[state:]
	}
	return m, nil
}

// Err returns the error of an Error message, nil for other messages.
func (m *Message) Err() error {
	if m.Type != Error {
		return nil
	}
	return &CodeError{Code(m.Number), m.Text}
}

// Before reports whether position a is before position b. Positions are modulo 2^64. A session from
// another server starts near 0 again. Its earlier positions are before 0.
func Before(a, b uint64) bool { return int64(a-b) < 0 }

// Elsewhere reports whether a name belongs to a server and not to a member. An agent joins services
// under the names of other servers, and accepts sessions for them.
func Elsewhere(name string) bool { return strings.HasPrefix(name, "@") }

// MoveMagic begins an agent's record of a moving session, kept in place of the application's state.
// It distinguishes the two, because an agent may die between acquiring a session and keeping it.
const MoveMagic = "\x00weir-move\xff"

// Moving reports whether a state is an agent's record of a moving session. Only an agent can
// continue such a session. Its socket may be stopped, or another server may already have the
// session.
func Moving(state []byte) bool { return bytes.HasPrefix(state, []byte(MoveMagic)) }

// ValidName reports whether a service or a member may have this name: 1 to 63 bytes of printable
// ASCII without spaces. It needs no quotes anywhere.
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
