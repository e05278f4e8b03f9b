// SPDX-License-Identifier: Apache-2.0

package repair

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
)

// The wire format of a state. docs/HANDOFF-WIRE.md has the table. Numbers are in network byte order.
const (
	wireMagic   = "WTCP"
	wireVersion = 1
	headerLen   = 8 // magic, version (2), zero (2)
	sectionLen  = 8 // type (1), flags (1), zero (2), length (4)
	coreLen     = 100
	optionLen   = 5
)

// Sections follow the header in this order, each at most once. The core is mandatory.
const (
	sectionCore = iota + 1
	sectionOptions
	sectionCongestion
	sectionZone
	sectionDevice
	sectionSend
	sectionUnread
	sectionTLS
)

// must is the flag of a mandatory section: a receiver rejects the state if it does not know the section's type. Other
// unknown sections are skipped.
const must = 1

// Bits of the core's flags.
const (
	flagTimestamps = 1 << iota
	flagMicroseconds
	flagSACK
	flagScaling
	flagEOF
	flagFin
	flagReuseAddr
	flagSndBufLocked
	flagRcvBufLocked
	flagIPv6 // an IPv6 socket; its addresses may be IPv4-mapped
	flagAll  = 1<<iota - 1
)

func (s *State) flags() (f uint16) {
	for i, on := range []bool{s.Timestamps, s.Microseconds, s.SACK, s.Scaling, s.EOF, s.Fin, s.ReuseAddr, s.SndBufLocked,
		s.RcvBufLocked, !s.Local.Addr().Is4()} {
		if on {
			f |= 1 << i
		}
	}
	return f
}

// MarshalBinary is [State.AppendBinary] to a new slice.
func (s *State) MarshalBinary() ([]byte, error) { return s.AppendBinary(nil) }

// AppendBinary appends the state in the format of docs/HANDOFF-WIRE.md. It fails with [errInvalid] for a state that
// no dump produces.
func (s *State) AppendBinary(b []byte) ([]byte, error) {
	if err := s.check(); err != nil {
		return nil, err
	}
	start := len(b)
	b = slices.Grow(b, headerLen+7*sectionLen+coreLen+optionLen*len(s.Options)+3*maxName+len(s.Send)+len(s.Unread))
	b = append(b, wireMagic...)
	b = binary.BigEndian.AppendUint16(b, wireVersion)
	b = append(b, 0, 0)
	b = s.appendCore(section(b, sectionCore, coreLen))
	b = section(b, sectionOptions, optionLen*len(s.Options))
	for _, o := range s.Options {
		b = binary.BigEndian.AppendUint32(append(b, o.ID), o.Value)
	}
	for i, name := range []string{s.Congestion, s.Zone, s.Device} {
		if name != "" {
			b = append(section(b, byte(sectionCongestion+i), len(name)), name...)
		}
	}
	b = append(section(b, sectionSend, len(s.Send)), s.Send...)
	b = append(section(b, sectionUnread, len(s.Unread)), s.Unread...)
	return s.appendTLS(b, start), nil
}

func section(b []byte, kind byte, length int) []byte {
	return binary.BigEndian.AppendUint32(append(b, kind, must, 0, 0), uint32(length))
}

func (s *State) appendCore(b []byte) []byte {
	be := binary.BigEndian
	b = be.AppendUint16(b, s.flags())
	b = append(b, s.SndScale, s.RcvScale)
	for _, a := range []netip.AddrPort{s.Local, s.Remote} {
		ip := a.Addr().As16()
		b = append(b, ip[:]...)
	}
	for _, v := range []uint16{s.Local.Port(), s.Remote.Port(), s.MSS, 0} {
		b = be.AppendUint16(b, v)
	}
	w := &s.Window
	for _, v := range []uint32{s.Timestamp, s.SndUna, s.RcvNxt, w.SndWl1, w.SndWnd, w.MaxWindow, w.RcvWnd, w.RcvWup,
		uint32(s.Unsent), uint32(s.Linger), s.SndBuf, s.RcvBuf, 0, 0} {
		b = be.AppendUint32(b, v)
	}
	return b
}

// UnmarshalBinary parses the output of [State.AppendBinary], and copies it.
func (s *State) UnmarshalBinary(b []byte) error {
	p, err := Parse(slices.Clone(b))
	if err != nil {
		return err
	}
	*s = *p
	return nil
}

// Parse is [State.UnmarshalBinary] without the copy: the state's queues are slices of b. Its allocations do not
// exceed the size of b. Errors are [errFormat], [errVersion] and [errInvalid].
func Parse(b []byte) (*State, error) {
	if len(b) < headerLen || string(b[:4]) != wireMagic {
		return nil, fmt.Errorf("%w: it does not start with %s", errFormat, wireMagic)
	}
	if v := binary.BigEndian.Uint16(b[4:]); v != wireVersion {
		return nil, fmt.Errorf("%w: version %d, want %d", errVersion, v, wireVersion)
	}
	if b[6]|b[7] != 0 {
		return nil, fmt.Errorf("%w: its header is longer", errFormat)
	}
	s, last, all := &State{}, byte(0), b
	for b = b[headerLen:]; len(b) > 0; {
		if len(b) < sectionLen {
			return nil, fmt.Errorf("%w: truncated after section %d", errFormat, last)
		}
		kind, flags, n := b[0], b[1], binary.BigEndian.Uint32(b[4:])
		if kind <= last || b[2]|b[3] != 0 || uint64(n) > uint64(len(b)-sectionLen) {
			return nil, fmt.Errorf("%w: section %d of %d bytes after section %d, with %d bytes left", errFormat, kind, n, last, len(b)-sectionLen)
		}
		end := sectionLen + int(n)
		before := all[:len(all)-len(b)+end]
		if err := s.parseSection(kind, flags, b[sectionLen:end:end], before); err != nil {
			return nil, err
		}
		last, b = kind, b[end:]
	}
	if !s.Local.IsValid() {
		return nil, fmt.Errorf("%w: the core is missing", errFormat)
	}
	return s, s.check()
}

// parseSection parses a section's content. before is the state up to the section's end.
func (s *State) parseSection(kind, flags byte, b, before []byte) error {
	switch kind {
	case sectionCore:
		return s.parseCore(b)
	case sectionOptions:
		if len(b)%optionLen != 0 || len(b) > 255*optionLen {
			return fmt.Errorf("%w: options of %d bytes", errFormat, len(b))
		}
		for ; len(b) > 0; b = b[optionLen:] {
			s.Options = append(s.Options, Option{b[0], binary.BigEndian.Uint32(b[1:])})
		}
	case sectionCongestion, sectionZone, sectionDevice:
		name, err := parseName(b)
		*[]*string{&s.Congestion, &s.Zone, &s.Device}[kind-sectionCongestion] = name
		return err
	case sectionSend:
		s.Send = b
	case sectionUnread:
		s.Unread = b
	case sectionTLS:
		return s.parseTLS(b, before)
	default:
		if flags&must != 0 {
			return fmt.Errorf("%w: section %d", errVersion, kind)
		}
	}
	return nil
}

// parseName parses the name of an interface or algorithm.
func parseName(b []byte) (string, error) {
	ok := func(c byte) bool { return c > ' ' && c < 0x7f && c != '/' }
	if len(b) == 0 || len(b) > maxName || slices.ContainsFunc(b, func(c byte) bool { return !ok(c) }) {
		return "", fmt.Errorf("%w: name %q", errFormat, b[:min(len(b), 2*maxName)])
	}
	return string(b), nil
}

func (s *State) parseCore(b []byte) error {
	if len(b) != coreLen {
		return fmt.Errorf("%w: a core of %d bytes", errFormat, len(b))
	}
	be := binary.BigEndian
	f := be.Uint16(b)
	if f&^uint16(flagAll) != 0 {
		return fmt.Errorf("%w: flags %#x", errVersion, f)
	}
	for i, p := range []*bool{&s.Timestamps, &s.Microseconds, &s.SACK, &s.Scaling, &s.EOF, &s.Fin, &s.ReuseAddr, &s.SndBufLocked, &s.RcvBufLocked} {
		*p = f&(1<<i) != 0
	}
	s.SndScale, s.RcvScale = b[2], b[3]
	for i, p := range []*netip.AddrPort{&s.Local, &s.Remote} {
		ip := netip.AddrFrom16([16]byte(b[4+16*i:]))
		if f&flagIPv6 == 0 {
			if !ip.Is4In6() {
				return fmt.Errorf("%w: address %s of an IPv4 socket", errInvalid, ip)
			}
			ip = ip.Unmap()
		}
		*p = netip.AddrPortFrom(ip, be.Uint16(b[36+2*i:]))
	}
	s.MSS = be.Uint16(b[40:])
	var unsent, linger, zero uint32
	w := &s.Window
	for i, p := range []*uint32{&s.Timestamp, &s.SndUna, &s.RcvNxt, &w.SndWl1, &w.SndWnd, &w.MaxWindow, &w.RcvWnd, &w.RcvWup,
		&unsent, &linger, &s.SndBuf, &s.RcvBuf, &zero, &zero} {
		*p = be.Uint32(b[44+4*i:])
	}
	s.Unsent, s.Linger = int(int32(unsent)), int(int32(linger))
	return nil
}
