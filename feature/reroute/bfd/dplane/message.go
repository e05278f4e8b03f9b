// SPDX-License-Identifier: Apache-2.0

// Package dplane takes over sessions of FRR's bfdd. bfdd talks to the routing protocols and its operator; the
// connected client runs the sessions on the wire. The protocol is FRR's bfdd/bfddp_packet.h, versions 1 and 2.
package dplane

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"time"

	"github.com/weir-project/weir/feature/reroute/bfd"
)

// Types of messages.
const (
	echoRequest     = 0
	echoReply       = 1
	addSession      = 2
	deleteSession   = 3
	stateChange     = 4
	requestCounters = 5
	sessionCounters = 6
)

// Flags of a session.
const (
	flagMultihop = 1 << iota
	flagDemand
	flagIndependent
	flagEcho
	flagIPv6
	flagPassive
	flagShutdown
)

const (
	headLength    = 8
	sessionLength = 132 // of version 1; version 2 appends fields weir does not use
	changeLength  = 28  // the last byte is padding
	maxLength     = 4096
)

// errProtocol reports unexpected data from bfdd.
var errProtocol = errors.New("bfdd's data-plane protocol")

// Session is a session as requested by bfdd.
type Session struct {
	Config      bfd.Config
	Local, Peer netip.Addr // Local may be unspecified: then the device's
	Device      string     // empty if bfdd does not know it yet: then the local address's
	Ifindex     int
	Multihop    bool
	HopLimit    uint8 // lowest accepted hop limit
	Echo        bool
	EchoTx      time.Duration
	Hold        time.Duration // delay before the session starts
}

// Change is the state of a session for bfdd.
type Change struct {
	Discriminator uint32
	State         bfd.State // of this end
	Remote        bfd.Remote
}

// Counters are the counters of a session: packets, and bytes of UDP payload.
type Counters struct{ In, InBytes, Out, OutBytes, EchoIn, EchoInBytes, EchoOut, EchoOutBytes uint64 }

// message is a received message.
type message struct {
	version byte
	kind    uint16
	id      uint16
	body    []byte
}

func read(r io.Reader) (m message, err error) {
	var head [headLength]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return m, err
	}
	length := int(binary.BigEndian.Uint16(head[6:]))
	m = message{version: head[0], kind: binary.BigEndian.Uint16(head[2:]), id: binary.BigEndian.Uint16(head[4:])}
	if m.version != 1 && m.version != 2 {
		return m, fmt.Errorf("%w: version %d; weir has 1 and 2", errProtocol, m.version)
	}
	if length < headLength || length > maxLength {
		return m, fmt.Errorf("%w: a message of %d bytes", errProtocol, length)
	}
	m.body = make([]byte, length-headLength)
	if _, err := io.ReadFull(r, m.body); err != nil {
		return m, fmt.Errorf("%w: the stream ends within a message: %w", errProtocol, err)
	}
	return m, nil
}

// appendMessage writes a message in bfdd's version.
func appendMessage(b []byte, version byte, kind, id uint16, body []byte) []byte {
	b = append(b, version, 0)
	b = binary.BigEndian.AppendUint16(b, kind)
	b = binary.BigEndian.AppendUint16(b, id)
	b = binary.BigEndian.AppendUint16(b, uint16(headLength+len(body)))
	return append(b, body...)
}

func parseSession(b []byte) (s Session, err error) {
	if len(b) < sessionLength {
		return s, fmt.Errorf("%w: a session of %d bytes, want %d", errProtocol, len(b), sessionLength)
	}
	word := func(at int) uint32 { return binary.BigEndian.Uint32(b[at:]) }
	micros := func(at int) time.Duration { return time.Duration(word(at)) * time.Microsecond }
	flags := word(0)
	addr := func(at int) netip.Addr {
		if flags&flagIPv6 != 0 {
			return netip.AddrFrom16([16]byte(b[at:]))
		}
		return netip.AddrFrom4([4]byte(b[at:]))
	}
	name, _, _ := bytes.Cut(b[68:sessionLength], []byte{0})
	s = Session{
		Config: bfd.Config{Discriminator: word(36), Multiplier: b[61], DesiredTx: micros(40), RequiredRx: micros(44),
			Passive: flags&flagPassive != 0, Down: flags&flagShutdown != 0},
		Local: addr(4), Peer: addr(20), Device: string(name), Ifindex: int(word(64)), Multihop: flags&flagMultihop != 0,
		HopLimit: b[60], Echo: flags&flagEcho != 0, EchoTx: micros(48), Hold: time.Duration(word(56)) * time.Millisecond,
	}
	if s.Echo {
		s.Config.EchoRx = micros(52)
	}
	if err := s.Config.Validate(); err != nil {
		return s, fmt.Errorf("%w: the session with %s: %w", errProtocol, s.Peer, err)
	}
	return s, nil
}

func (c Change) append(b []byte) []byte {
	b = binary.BigEndian.AppendUint32(b, c.Discriminator)
	b = binary.BigEndian.AppendUint32(b, c.Remote.Discriminator)
	var flags uint32
	if c.Remote.Independent {
		flags |= 1
	}
	if c.Remote.Demand {
		flags |= 2
	}
	b = binary.BigEndian.AppendUint32(b, flags)
	for _, d := range []time.Duration{c.Remote.DesiredTx, c.Remote.RequiredRx, c.Remote.EchoRx} {
		b = binary.BigEndian.AppendUint32(b, uint32(d.Microseconds()))
	}
	return append(b, byte(c.State), byte(c.Remote.Diag), c.Remote.Multiplier, 0)
}

func (n Counters) append(b []byte, discriminator uint32) []byte {
	b = binary.BigEndian.AppendUint32(b, discriminator)
	b = append(b, 0, 0, 0, 0) // alignment padding of the C struct
	for _, v := range []uint64{n.InBytes, n.In, n.OutBytes, n.Out, n.EchoInBytes, n.EchoIn, n.EchoOutBytes, n.EchoOut} {
		b = binary.BigEndian.AppendUint64(b, v)
	}
	return b
}
