// SPDX-License-Identifier: Apache-2.0

package bfdtest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/weir-project/weir/feature/reroute/bfd"
)

// Ports of control and echo packets, RFC 5881 section 4.
const (
	Port     = 3784
	EchoPort = 3785
)

// HopLimit is the sent and required hop limit of control packets (RFC 5881 section 5, GTSM).
const HopLimit = 255

// Packet is a control packet, RFC 5880 section 4.1. Intervals are whole microseconds, up to 2^32-1.
type Packet struct {
	State       bfd.State
	Diag        bfd.Diag
	Poll, Final bool
	Independent bool // the data path survives restarts of the control plane
	Demand      bool
	Multiplier  uint8
	Mine, Yours uint32 // discriminators of the sender and the receiver (0 while unknown)
	DesiredTx   time.Duration
	RequiredRx  time.Duration
	EchoRx      time.Duration
	Auth        *Auth // nil: without authentication
}

// Bits of the second octet.
const (
	pollBit        = 1 << 5
	finalBit       = 1 << 4
	independentBit = 1 << 3
	authBit        = 1 << 2
	demandBit      = 1 << 1
	multipointBit  = 1 << 0
)

const (
	version    = 1
	headLength = 24
)

// errPacket reports a packet to be discarded, with the reason in its text (RFC 5880 section 6.8.6).
var errPacket = errors.New("not a control packet")

// Append writes the packet. The digest of its authentication is zero: Seal writes it.
func (p *Packet) Append(b []byte) []byte {
	bits := byte(p.State) << 6
	for bit, on := range map[byte]bool{pollBit: p.Poll, finalBit: p.Final, independentBit: p.Independent, demandBit: p.Demand, authBit: p.Auth != nil} {
		if on {
			bits |= bit
		}
	}
	length := headLength
	if p.Auth != nil {
		length += authLength
	}
	b = append(b, version<<5|byte(p.Diag)&31, bits, p.Multiplier, byte(length))
	b = binary.BigEndian.AppendUint32(b, p.Mine)
	b = binary.BigEndian.AppendUint32(b, p.Yours)
	for _, d := range []time.Duration{p.DesiredTx, p.RequiredRx, p.EchoRx} {
		b = binary.BigEndian.AppendUint32(b, micros(d))
	}
	if p.Auth != nil {
		b = p.Auth.append(b)
	}
	return b
}

// micros converts an interval for the wire.
func micros(d time.Duration) uint32 {
	return uint32(min(max(d.Microseconds(), 0), math.MaxUint32))
}

// Parse reads a packet from a UDP payload and makes the sessionless checks of RFC 5880 section 6.8.6. It parses the
// authentication; Check verifies it.
func Parse(b []byte) (p Packet, err error) {
	fail := func(format string, a ...any) (Packet, error) {
		return p, fmt.Errorf("%w: "+format, append([]any{errPacket}, a...)...)
	}
	if len(b) < headLength {
		return fail("%d bytes, want %d at least", len(b), headLength)
	}
	bits, length := b[1], int(b[3])
	least := headLength
	if bits&authBit != 0 {
		least += 2
	}
	interval := func(at int) time.Duration {
		return time.Duration(binary.BigEndian.Uint32(b[at:])) * time.Microsecond
	}
	p = Packet{Diag: bfd.Diag(b[0] & 31), State: bfd.State(bits >> 6), Poll: bits&pollBit != 0, Final: bits&finalBit != 0,
		Independent: bits&independentBit != 0, Demand: bits&demandBit != 0, Multiplier: b[2],
		Mine: binary.BigEndian.Uint32(b[4:]), Yours: binary.BigEndian.Uint32(b[8:]),
		DesiredTx: interval(12), RequiredRx: interval(16), EchoRx: interval(20)}
	switch {
	case b[0]>>5 != version:
		return fail("version %d, want %d", b[0]>>5, version)
	case length < least || length > len(b):
		return fail("its length says %d bytes; %d have come, and %d is the least", length, len(b), least)
	case p.Multiplier == 0:
		return fail("detection multiplier 0")
	case bits&multipointBit != 0:
		return fail("multipoint bit")
	case p.Mine == 0:
		return fail("the sender's discriminator is 0")
	case p.Yours == 0 && p.State != bfd.Down && p.State != bfd.AdminDown:
		return fail("your discriminator is 0 in state %s", p.State)
	case p.Poll && p.Final:
		return fail("poll and final at once")
	}
	if bits&authBit != 0 {
		p.Auth, err = parseAuth(b[headLength:length])
	} else if length != headLength {
		return fail("%d bytes without authentication, want %d", length, headLength)
	}
	return p, err
}
