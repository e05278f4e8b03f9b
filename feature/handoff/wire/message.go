// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"strings"
)

// Message is one message. All have the same layout; what a type does not use is
// zero.
type Message struct {
	Version uint8 // 0: Version, when sent
	Type    Type
	Flags   Flags
	Seq     uint32 // of a request that wants an answer, and of its answer; else 0
	Session uint64 // the socket's cookie (SO_COOKIE)
	Read    uint64 // bytes out of the receive queue since the connection began: those that State accounts for, then Unread
	Written uint64 // bytes of the other direction that State accounts for
	Number  uint32
	Name    string
	Text    string
	State   []byte
	Sizes   [2]uint64 // with StateFD: of State and of Unread, one behind the other in the memfd; see Fetch
	Cut     bool      // as received: the descriptors that came with it are missing, because this process may have no more
	Unread  []byte    // bytes out of the receive queue that State does not account for: the next owner reads them first
}

// Append appends the message's bytes, all numbers little-endian.
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

// parse reads a message, which must be all of b. Its State and Unread are parts of b. What it
// does not know is no error: flags, types and a version of later clients are the
// receiver's to judge. The error wraps [ErrMalformed].
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
		// The numbers are of what is in the memfd.
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

// Err is the error that an Error message carries, nil for other messages.
func (m *Message) Err() error {
	if m.Type != Error {
		return nil
	}
	return &CodeError{Code(m.Number), m.Text}
}

// Before says whether position a lies before position b. Positions are counted modulo 2^64: a session that has come from
// another server begins near 0 again, and what was written there and is not accounted for yet lies before 0.
func Before(a, b uint64) bool { return int64(a-b) < 0 }

// Elsewhere says whether a name is not that of a member, but of a server: the agent of this one joins services under the
// names of others, and takes sessions there.
func Elsewhere(name string) bool { return strings.HasPrefix(name, "@") }

// MoveMagic begins what agents have a keeper keep of a session while it moves between servers, in place of the application's
// state. It tells the two apart: an agent may die between being given a session and keeping it.
const MoveMagic = "\x00weir-move\xff"

// Moving says whether a state was kept by an agent, of a session in the midst of a move. Nobody but an agent can go on with it:
// its socket may be stopped, or another server's by now.
func Moving(state []byte) bool { return bytes.HasPrefix(state, []byte(MoveMagic)) }

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
