// SPDX-License-Identifier: Apache-2.0

package onehost

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// BMP message types (RFC 7854 section 4.1).
const (
	routeMonitoring = 0
	statistics      = 1
	peerDown        = 2
	peerUp          = 3
	initiation      = 4
	termination     = 5
)

const (
	bmpHeader = 6
	perPeer   = 42
	bgpHeader = 19
	largest   = 1 << 16 // maximum of a router's message: two OPENs of up to 4 KiB, or an UPDATE
)

var be = binary.BigEndian

// errBroken reports bytes other than a BMP message: some were lost, doubled or changed.
var errBroken = errors.New("not a BMP message")

// peerKey identifies a peer of a router: the first 26 bytes of the per-peer header without unused flag
// bits. The routes before and after policy have different keys (RFC 7854 section 4.2).
type peerKey [26]byte

// message is one BMP message.
type message struct {
	kind byte
	peer peerKey
	body []byte // after the per-peer header, if any
}

// next returns the first message of b and its length n, 0 if it is incomplete.
func next(b []byte) (m message, n int, err error) {
	if len(b) < bmpHeader {
		return m, 0, nil
	}
	size, kind := be.Uint32(b[1:]), b[5]
	hasPeer := kind <= peerUp
	least := uint32(bmpHeader)
	if hasPeer {
		least += perPeer
	}
	if b[0] != 3 || kind > termination || size < least || size > largest {
		return m, 0, fmt.Errorf("%w: version %d, type %d, %d bytes", errBroken, b[0], kind, size)
	}
	if uint32(len(b)) < size {
		return m, 0, nil
	}
	m = message{kind: kind, body: b[least:size]}
	if hasPeer {
		copy(m.peer[:], b[bmpHeader:])
		m.peer[1] &= 0x80 | 0x40 // V, L
	}
	return m, int(size), nil
}

// update is a BGP UPDATE of IPv4 unicast (RFC 4271 section 4.3).
type update struct {
	withdrawn, announced [][]byte // prefixes in the format of the message: a length in bits, and its bytes
	attributes           []byte
}

// endOfRIB reports whether an UPDATE marks the end of a table (RFC 4724 section 2).
func (u update) endOfRIB() bool {
	return len(u.withdrawn) == 0 && len(u.announced) == 0 && len(u.attributes) == 0
}

// parseUpdate parses the BGP message within a Route Monitoring message.
func parseUpdate(b []byte) (u update, err error) {
	if len(b) < bgpHeader+4 || int(be.Uint16(b[16:])) != len(b) || b[18] != 2 {
		return u, fmt.Errorf("%w: %d bytes without an UPDATE", errBroken, len(b))
	}
	rest := b[bgpHeader:]
	part := func() ([]byte, error) {
		if len(rest) < 2 || len(rest) < 2+int(be.Uint16(rest)) {
			return nil, fmt.Errorf("%w: truncated UPDATE", errBroken)
		}
		n := 2 + int(be.Uint16(rest))
		p := rest[2:n]
		rest = rest[n:]
		return p, nil
	}
	withdrawn, err := part()
	if err == nil {
		u.attributes, err = part()
	}
	if err == nil {
		u.withdrawn, err = prefixes(withdrawn)
	}
	if err == nil {
		u.announced, err = prefixes(rest)
	}
	return u, err
}

func prefixes(b []byte) (out [][]byte, err error) {
	for len(b) > 0 {
		n := 1 + (int(b[0])+7)/8
		if b[0] > 32 || len(b) < n {
			return nil, fmt.Errorf("%w: a prefix of %d bits in %d bytes", errBroken, b[0], len(b)-1)
		}
		out, b = append(out, b[:n]), b[n:]
	}
	return out, nil
}
