// SPDX-License-Identifier: Apache-2.0

package bfd

import (
	"errors"
	"fmt"
	"math"
	"time"
)

// SlowTx is the shortest interval a session may request while it is not up (RFC 5880 section 6.8.3), because many
// sessions may be down at once.
const SlowTx = time.Second

// Config configures one end of a session.
type Config struct {
	Discriminator uint32        // of this end; unique, not 0
	Multiplier    uint8         // number of missing packets for a failure; from 1
	DesiredTx     time.Duration // shortest time between packets sent; whole microseconds, not 0
	RequiredRx    time.Duration // shortest time between packets received; 0: the peer shall send none
	EchoRx        time.Duration // shortest time between received echo packets; 0: echo is not looped back
	Passive       bool          // send nothing before the peer does
	Down          bool          // administratively down
}

// Validate returns the first error of a session's configuration.
func (c Config) Validate() error {
	switch {
	case c.Discriminator == 0:
		return errors.New("discriminator 0: use another")
	case c.Multiplier == 0:
		return errors.New("detection multiplier 0: use 1 or more, 3 in general")
	}
	for name, d := range map[string]time.Duration{"transmit": c.DesiredTx, "receive": c.RequiredRx, "echo receive": c.EchoRx} {
		if d < 0 || d%time.Microsecond != 0 || d.Microseconds() != int64(micros(d)) {
			return fmt.Errorf("%s interval %s: use whole microseconds, up to %d", name, d, uint32(1<<32-1))
		}
	}
	if c.DesiredTx == 0 {
		return errors.New("transmit interval 0: use some milliseconds")
	}
	return nil
}

// Remote holds the peer's last values; zero before its first packet.
type Remote struct {
	State         State
	Diag          Diag
	Discriminator uint32
	Multiplier    uint8
	DesiredTx     time.Duration
	RequiredRx    time.Duration
	EchoRx        time.Duration
	Demand        bool
	Independent   bool
}

// micros converts an interval for the wire.
func micros(d time.Duration) uint32 {
	return uint32(min(max(d.Microseconds(), 0), math.MaxUint32))
}
