// SPDX-License-Identifier: Apache-2.0

package bfd

import (
	"errors"
	"fmt"
	"math"
	"time"
)

// SlowTx is the least interval that a session asks for while it is not up (RFC 5880 6.8.3): of those that are down there may
// be many.
const SlowTx = time.Second

// Config is what a session is made of.
type Config struct {
	Discriminator uint32        // of this end: not 0, and no other session's
	Multiplier    uint8         // of packets in a row that may be lost, plus one; from 1
	DesiredTx     time.Duration // least time between packets that this end would like to send; whole microseconds, not 0
	RequiredRx    time.Duration // the same, of packets that it is able to receive; 0: the other end is to send none
	EchoRx        time.Duration // the same, of echo packets; 0: this end does not loop any back
	Passive       bool          // not a word before the other end has spoken
	Down          bool          // administratively
}

// Validate says what is wrong with a session's configuration.
func (c Config) Validate() error {
	switch {
	case c.Discriminator == 0:
		return errors.New("discriminator 0: take another")
	case c.Multiplier == 0:
		return errors.New("detection multiplier 0: take 1 or more, 3 in general")
	}
	for name, d := range map[string]time.Duration{"transmit": c.DesiredTx, "receive": c.RequiredRx, "echo receive": c.EchoRx} {
		if d < 0 || d%time.Microsecond != 0 || d.Microseconds() != int64(micros(d)) {
			return fmt.Errorf("%s interval %s: take whole microseconds, up to %d", name, d, uint32(1<<32-1))
		}
	}
	if c.DesiredTx == 0 {
		return errors.New("transmit interval 0: take some milliseconds")
	}
	return nil
}

// Remote is what the other end last said; zero before.
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

// micros is an interval as on the wire.
func micros(d time.Duration) uint32 {
	return uint32(min(max(d.Microseconds(), 0), math.MaxUint32))
}
