// SPDX-License-Identifier: Apache-2.0

// Package bfdtest is the model of BFD that tests compare the programs with: sessions and
// control packets of RFC 5880 in Go.
package bfdtest

import (
	"fmt"
	"time"

	"github.com/weir-project/weir/feature/reroute/bfd"
)

// Session is one end's state of a session, RFC 5880 6.8.1. It is not safe for concurrent use.
type Session struct {
	c      bfd.Config
	State  bfd.State
	Diag   bfd.Diag
	Remote bfd.Remote

	port            uint16 // of the other end; 0: not known
	poll, pollAgain bool
	// What applies until a poll sequence has ended, RFC 5880 6.8.3: not yet slower in sending, not yet less patient.
	txFloor, rxInUse time.Duration
}

// New makes a session that is down. The configuration is valid.
func New(c bfd.Config) *Session {
	s := &Session{c: c, State: bfd.Down, rxInUse: c.RequiredRx}
	s.forget()
	s.setDown(c.Down)
	return s
}

// forget is at the beginning, and when nothing has come for the detection time.
func (s *Session) forget() {
	s.Remote = bfd.Remote{State: bfd.Down, RequiredRx: time.Microsecond}
	s.port = 0
}

// Config is what the session was last told.
func (s *Session) Config() bfd.Config { return s.c }

// Packet is what is to be sent, once an interval, and at once when it has changed.
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

// Interval is how often to send, of which RFC 5880 6.8.7 wants 75 to 100 % at random (75 to 90 with a multiplier of 1); 0:
// not at all.
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

// DetectionTime is how long nothing may come until the other end is taken for dead; 0: nothing is expected.
func (s *Session) DetectionTime() time.Duration {
	if s.State != bfd.Init && s.State != bfd.Up {
		return 0
	}
	return s.Lifetime()
}

// Lifetime is how long what the other end has said is good, in any state (RFC 5880 6.8.1, bfd.RemoteDiscr); 0: for good, or it
// has said nothing. Where the session may go down by silence it is the detection time.
func (s *Session) Lifetime() time.Duration {
	if s.Remote.Discriminator == 0 {
		return 0
	}
	return time.Duration(s.Remote.Multiplier) * s.expected()
}

// expected is how often the other end sends at least; 0: not at all.
func (s *Session) expected() time.Duration {
	if s.rxInUse == 0 {
		return 0
	}
	return max(s.rxInUse, s.Remote.DesiredTx)
}

// How long another port or discriminator than the other end's is refused while that one is silent: for so long, and so many
// packets, of a session that is not up.
const (
	holdUp, holdDown = time.Minute, 3 * time.Second
	holdPackets      = 3
)

// Foreign says whether a packet without authentication is from another sender than the other end, silent for so long.
func (s *Session) Foreign(port uint16, p Packet, silent time.Duration) bool {
	if s.Remote.Discriminator == 0 || s.Remote.Discriminator == p.Mine && (s.port == 0 || s.port == port) {
		return false
	}
	if s.State == bfd.Up && s.rxInUse != 0 {
		return silent <= holdUp
	}
	return silent <= min(holdDown, time.Duration(min(s.Remote.Multiplier, holdPackets))*max(s.rxInUse, s.Remote.DesiredTx))
}

// ReceiveFrom is Receive of a packet from a port.
func (s *Session) ReceiveFrom(port uint16, p Packet) (final bool, err error) {
	if final, err = s.Receive(p); err == nil {
		s.port = port
	}
	return final, err
}

// Receive takes an authentic packet of the other end. It returns whether it is to be answered at once, by Packet with Final in
// place of Poll.
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
		s.startPoll(bfd.SlowTx) // it has sent slowly until here
	case s.State == bfd.Up && p.State == bfd.Down:
		s.down(bfd.NeighbourDown)
	}
	return p.Poll, nil
}

// Expire is called when nothing has come for the lifetime of what came before. Whoever is there by now, perhaps begun anew, is
// not who it was: it takes no packets that name another's discriminator, and says nothing by itself if it is passive.
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

// setDown takes the session administratively down, or lets it come up again.
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

// Set changes intervals, the multiplier and the other properties of a session that goes on. The other end is told by a poll
// sequence if the session is up.
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
	if s.poll { // its answer may be about what was said before
		s.pollAgain = true
		if s.txFloor == 0 || txBefore < s.txFloor {
			s.txFloor = txBefore
		}
		return
	}
	s.poll, s.txFloor = true, txBefore
}

func (s *Session) endPoll() {
	if s.pollAgain { // what applies goes on to
		s.pollAgain = false
		return
	}
	s.poll, s.txFloor = false, 0
	s.rxInUse = s.c.RequiredRx
}
