// SPDX-License-Identifier: Apache-2.0

package bfd

import (
	"fmt"
	"slices"
)

// EchoLength is the length of weir's echo packets after the UDP header, in bytes.
const EchoLength = 24

// State is the state of a session, RFC 5880 section 4.1.
type State uint8

// States, as on the wire.
const (
	AdminDown State = iota
	Down
	Init
	Up
)

var states = [...]string{"admin-down", "down", "init", "up"}

func (s State) String() string { return states[s&3] }

// MarshalText implements encoding.TextMarshaler.
func (s State) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (s *State) UnmarshalText(text []byte) error {
	i := slices.Index(states[:], string(text))
	if i < 0 {
		return fmt.Errorf("%q is no state of a BFD session", text)
	}
	*s = State(i)
	return nil
}

// Diag is the reason a session last left the state Up, RFC 5880 section 4.1.
type Diag uint8

// Diagnostics, as on the wire.
const (
	NoDiag        Diag = 0
	TimeExpired   Diag = 1 // nothing received for the detection time
	EchoFailed    Diag = 2
	NeighbourDown Diag = 3 // the peer reported down
	PathDown      Diag = 5
	AdminDiag     Diag = 7
)

var diags = [...]string{"none", "control detection time expired", "echo function failed", "neighbor signaled session down", "forwarding plane reset",
	"path down", "concatenated path down", "administratively down", "reverse concatenated path down"}

const reservedDiag = "reserved diagnostic %d"

func (d Diag) String() string {
	if int(d) < len(diags) {
		return diags[d]
	}
	return fmt.Sprintf(reservedDiag, uint8(d))
}

// MarshalText implements encoding.TextMarshaler.
func (d Diag) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (d *Diag) UnmarshalText(text []byte) error {
	if i := slices.Index(diags[:], string(text)); i >= 0 {
		*d = Diag(i)
		return nil
	}
	var n uint8
	if _, err := fmt.Sscanf(string(text), reservedDiag, &n); err != nil {
		return fmt.Errorf("%q is no diagnostic of a BFD session", text)
	}
	*d = Diag(n)
	return nil
}

// FirstSourcePort is the first source port, RFC 5881 section 4.
const FirstSourcePort = 49152
