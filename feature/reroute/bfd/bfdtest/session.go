// SPDX-License-Identifier: Apache-2.0

// Package bfdtest is a model of BFD for tests of the programs: sessions and control packets of RFC 5880 in Go.
package bfdtest

import (
	"fmt"
	"time"

	"github.com/weir-project/weir/feature/reroute/bfd"
)

// Session is one end of a session, RFC 5880 section 6.8.1. It is not safe for concurrent use.
type Session struct {
	c      bfd.Config
	State  bfd.State
	Diag   bfd.Diag
	Remote bfd.Remote

	port            uint16 // of the peer; 0: unknown
	poll, pollAgain bool
	// The values in use until a poll sequence ends, RFC 5880 section 6.8.3: neither slower sending nor a shorter
	// detection yet.
	txFloor, rxInUse time.Duration
}

// New returns a session that is down. The configuration must be valid.
func New(c bfd.Config) *Session {
	s := &Session{c: c, State: bfd.Down, rxInUse: c.RequiredRx}
	s.forget()
	s.setDown(c.Down)
	return s
}

// forget resets the peer's values, at the start and after the detection time without packets.
func (s *Session) forget() {
	s.Remote = bfd.Remote{State: bfd.Down, RequiredRx: time.Microsecond}
	s.port = 0
}

// Config returns the current configuration.
func (s *Session) Config() bfd.Config { return s.c }

// Packet returns the packet to send, once an interval and at once after a change.
func (s *Session) Packet() Packet {
	return Packet{State: s.State, Diag: s.Diag, Poll: s.poll, Multiplier: s.c.Multiplier, Independent: true,
		Mine: s.c.Discriminator, Yours: s.Remote.Discriminator, DesiredTx: s.desiredTx(), RequiredRx: s.c.RequiredRx, EchoRx: s.c.EchoRx}
}

func (s *Session) desiredTx() time.Duration {
	if s.State != bfd.Up {
		return max(s.c.DesiredTx, bfd.SlowTx)
	}
	return s.c.DesiredTx
}

// Interval returns the transmit interval; 0: no packets. RFC 5880 section 6.8.7 requires a random 75 to 100 % of it
// (75 to 90 % with a multiplier of 1).
func (s *Session) Interval() time.Duration {
	switch {
	case s.c.Passive && s.Remote.Discriminator == 0,
		s.Remote.RequiredRx == 0,
		s.Remote.Demand && s.State == bfd.Up && s.Remote.State == bfd.Up && !s.poll:
		return 0
	}
	tx := s.desiredTx()
	if s.poll && s.txFloor != 0 {
		tx = min(tx, s.txFloor)
	}
	return max(tx, s.Remote.RequiredRx)
}

// DetectionTime returns the longest accepted silence of the peer; 0: no packets are expected.
func (s *Session) DetectionTime() time.Duration {
	if s.State != bfd.Init && s.State != bfd.Up {
		return 0
	}
	return s.Lifetime()
}

// Lifetime returns how long the peer's values are valid, in any state (RFC 5880 section 6.8.1, bfd.RemoteDiscr); 0:
// without limit, or there are none. In the states Init and Up it is the detection time.
func (s *Session) Lifetime() time.Duration {
	if s.Remote.Discriminator == 0 {
		return 0
	}
	return time.Duration(s.Remote.Multiplier) * s.expected()
}

// expected returns the peer's longest time between packets; 0: it sends none.
func (s *Session) expected() time.Duration {
	if s.rxInUse == 0 {
		return 0
	}
	return max(s.rxInUse, s.Remote.DesiredTx)
}

// Limits for rejecting another port or discriminator while the peer is silent. holdPackets applies to a session that
// is not up.
const (
	holdUp, holdDown = time.Minute, 3 * time.Second
	holdPackets      = 3
)

// Foreign reports whether an unauthenticated packet is from another sender than the peer, silent for the given time.
func (s *Session) Foreign(port uint16, p Packet, silent time.Duration) bool {
	if s.Remote.Discriminator == 0 || s.Remote.Discriminator == p.Mine && (s.port == 0 || s.port == port) {
		return false
	}
	if s.State == bfd.Up && s.rxInUse != 0 {
		return silent <= holdUp
	}
	return silent <= min(holdDown, time.Duration(min(s.Remote.Multiplier, holdPackets))*max(s.rxInUse, s.Remote.DesiredTx))
}

// ReceiveFrom is Receive for a packet with a known port.
func (s *Session) ReceiveFrom(port uint16, p Packet) (final bool, err error) {
	if final, err = s.Receive(p); err == nil {
		s.port = port
	}
	return final, err
}

// Receive handles an authentic packet of the peer. final requests an immediate answer: Packet with Final in place of
// Poll.
func (s *Session) Receive(p Packet) (final bool, err error) {
	if p.Yours != 0 && p.Yours != s.c.Discriminator {
		return false, fmt.Errorf("%w: it is for discriminator %d, and this is %d", errPacket, p.Yours, s.c.Discriminator)
	}
	s.Remote = bfd.Remote{State: p.State, Diag: p.Diag, Discriminator: p.Mine, Multiplier: p.Multiplier, DesiredTx: p.DesiredTx,
		RequiredRx: p.RequiredRx, EchoRx: p.EchoRx, Demand: p.Demand, Independent: p.Independent}
	if p.Final && s.poll {
		s.endPoll()
	}
	if s.State == bfd.AdminDown {
		return false, nil
	}
	switch {
	case p.State == bfd.AdminDown:
		if s.State != bfd.Down {
			s.down(bfd.NeighbourDown)
		}
	case s.State == bfd.Down && p.State == bfd.Down:
		s.State = bfd.Init
	case s.State == bfd.Down && p.State == bfd.Init, s.State == bfd.Init && p.State >= bfd.Init:
		s.State = bfd.Up
		s.Diag = bfd.NoDiag
		s.startPoll(bfd.SlowTx) // it was sending slowly before
	case s.State == bfd.Up && p.State == bfd.Down:
		s.down(bfd.NeighbourDown)
	}
	return p.Poll, nil
}

// Expire handles a silence of Lifetime. A peer now present, perhaps restarted, is another one. It ignores packets
// with its predecessor's discriminator and, if passive, sends nothing first.
func (s *Session) Expire() {
	said := s.Remote
	s.forget()
	if s.State == bfd.Init || s.State == bfd.Up {
		s.down(bfd.TimeExpired)
		return
	}
	s.Remote.State, s.Remote.Diag = said.State, said.Diag
}

func (s *Session) down(why bfd.Diag) {
	s.State, s.Diag = bfd.Down, why
	s.poll, s.pollAgain, s.txFloor, s.rxInUse = false, false, 0, s.c.RequiredRx
}

// setDown takes the session down administratively, or ends that.
func (s *Session) setDown(down bool) {
	switch {
	case down && s.State != bfd.AdminDown:
		s.down(bfd.AdminDiag)
		s.State = bfd.AdminDown
	case !down && s.State == bfd.AdminDown:
		s.down(bfd.NoDiag)
		s.forget()
	}
	s.c.Down = down
}

// Set changes the properties of a running session. If it is up, a poll sequence tells the peer.
func (s *Session) Set(c bfd.Config) {
	old := s.c
	c.Discriminator = old.Discriminator
	s.c = c
	s.setDown(c.Down)
	if s.State != bfd.Up {
		s.rxInUse = c.RequiredRx
		return
	}
	if c.DesiredTx != old.DesiredTx || c.RequiredRx != old.RequiredRx {
		s.rxInUse = max(s.rxInUse, c.RequiredRx)
		s.startPoll(old.DesiredTx)
	}
}

func (s *Session) startPoll(txBefore time.Duration) {
	if s.poll { // the answer may be to the earlier values
		s.pollAgain = true
		if s.txFloor == 0 || txBefore < s.txFloor {
			s.txFloor = txBefore
		}
		return
	}
	s.poll, s.txFloor = true, txBefore
}

func (s *Session) endPoll() {
	if s.pollAgain { // poll once more for the later change
		s.pollAgain = false
		return
	}
	s.poll, s.txFloor = false, 0
	s.rxInUse = s.c.RequiredRx
}
