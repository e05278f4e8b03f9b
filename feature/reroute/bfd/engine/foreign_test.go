// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"testing"
	"time"

	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/bfd/bfdtest"
)

const (
	neighbourPort = bfd.FirstSourcePort // of frame
	foreignPort   = neighbourPort + 1234
)

// hearFrom receives a packet from the neighbour's address with any port.
func (x *pace) hearFrom(port uint16, p bfdtest.Packet) {
	x.t.Helper()
	x.receive(fromPort(frame(x.s.Peer, x.s.Local, bfdtest.HopLimit, p.Append(nil)), port))
}

func (x *pace) look() Status {
	x.t.Helper()
	st, there, err := x.w.status(0)
	if err != nil || !there {
		x.t.Fatalf("%t, %v", there, err)
	}
	return st
}

// newNeighbour returns a session that is up. Its neighbour sends every 100 ms; the detection time is 300 ms.
func newNeighbour(t *testing.T) *pace {
	t.Helper()
	x := newPace(t, 100*time.Millisecond, 3)
	x.p.DesiredTx, x.p.Multiplier = 100*time.Millisecond, 3
	x.hear()
	if st := x.look(); st.State != bfd.Up || st.Detection != 300*time.Millisecond {
		t.Fatalf("%+v", st)
	}
	return x
}

// Packets of other users of the neighbour's host have no effect. They have another port (RFC 5881 section 4) or do
// not know the neighbour's discriminator.
func TestForeignPacketsOfSessionUp(t *testing.T) {
	for name, c := range map[string]struct {
		port    uint16
		state   bfd.State
		mine    uint32 // 0: the neighbour's
		unknown bool   // the sender does not know our discriminator
	}{
		"down, from another port":                         {port: foreignPort, state: bfd.Down, mine: 7, unknown: true},
		"admin down, from another port":                   {port: foreignPort, state: bfd.AdminDown, mine: 7, unknown: true},
		"down, from another port, by its discriminator":   {port: foreignPort, state: bfd.Down, unknown: true},
		"up, from another port, by both discriminators":   {port: foreignPort, state: bfd.Up},
		"down, from its port, by another discriminator":   {port: neighbourPort, state: bfd.Down, mine: 7, unknown: true},
		"admin down, its port, by another discriminator":  {port: neighbourPort, state: bfd.AdminDown, mine: 7, unknown: true},
		"up, from its port, by another discriminator too": {port: neighbourPort, state: bfd.Up, mine: 7},
	} {
		t.Run(name, func(t *testing.T) {
			x := newNeighbour(t)
			before := x.look()
			p := x.p
			p.State = c.state
			if c.mine != 0 {
				p.Mine = c.mine
			}
			if c.unknown {
				p.Yours = 0
			}
			x.hearFrom(c.port, p)
			if st := x.look(); st.State != bfd.Up || st.Remote != before.Remote || st.In != before.In || st.NotAuthentic != before.NotAuthentic+1 {
				t.Errorf("%+v\nbefore: %+v", st, before)
			}
		})
	}
}

// Foreign packets keep no silent neighbour alive. After the detection time a restarted neighbour is accepted.
func TestNeighbourBeginsAnew(t *testing.T) {
	x := newNeighbour(t)
	anew := x.p
	anew.State, anew.Mine, anew.Yours = bfd.Down, 99, 0
	for range 3 {
		x.hearFrom(foreignPort, anew)
		x.beat(90 * time.Millisecond)
	}
	if st := x.look(); st.State != bfd.Up {
		t.Fatalf("before the detection time: %+v", st)
	}
	x.beat(40 * time.Millisecond)
	if st := x.look(); st.State != bfd.Down || st.Diag != bfd.TimeExpired {
		t.Fatalf("after the detection time: %+v", st)
	}
	x.hearFrom(foreignPort, anew)
	if st := x.look(); st.State != bfd.Init || st.Remote.Discriminator != 99 {
		t.Errorf("the new one: %+v", st)
	}
	anew.State, anew.Yours = bfd.Init, x.s.Discriminator
	x.hearFrom(foreignPort, anew)
	if st := x.look(); st.State != bfd.Up {
		t.Errorf("the new one: %+v", st)
	}
	// The old port is foreign now.
	x.p.State, x.p.Yours = bfd.Down, 0
	x.hear()
	if st := x.look(); st.State != bfd.Up {
		t.Errorf("the old one: %+v", st)
	}
}

// A session taken down by its neighbour accepts no other sender either. A forged shutdown would end its verdict on
// the link. After three missing packets a new neighbour is accepted, however high the multiplier.
func TestForeignPacketsOfSessionDown(t *testing.T) {
	x := newNeighbour(t)
	x.p.State, x.p.Diag, x.p.DesiredTx, x.p.Multiplier = bfd.Down, bfd.TimeExpired, bfd.SlowTx, 125
	x.hear()
	other := x.p
	other.State, other.Mine, other.Yours = bfd.AdminDown, 7, 0
	x.hearFrom(foreignPort, other)
	if st := x.look(); st.State != bfd.Down || st.Remote.State != bfd.Down || st.Remote.Discriminator != x.p.Mine {
		t.Errorf("the other one: %+v", st)
	}
	x.beat(2900 * time.Millisecond)
	x.hearFrom(foreignPort, other)
	if st := x.look(); st.Remote.Discriminator != x.p.Mine {
		t.Errorf("the other one, before three packets: %+v", st)
	}
	x.beat(200 * time.Millisecond)
	other.State = bfd.Down
	x.hearFrom(foreignPort, other)
	if st := x.look(); st.State != bfd.Init || st.Remote.Discriminator != 7 {
		t.Errorf("the new one: %+v", st)
	}
}

// A forged neighbour with the longest intervals delays the real one by a minute at most.
func TestForeignPacketsFirst(t *testing.T) {
	for state, hold := range map[bfd.State]time.Duration{bfd.Down: 3 * time.Second, bfd.Up: time.Minute} {
		t.Run(state.String(), func(t *testing.T) {
			x := newNeighbour(t)
			x.p.State, x.p.Multiplier, x.p.DesiredTx = state, 255, (1<<32-1)*time.Microsecond
			x.hear()
			real := x.p
			real.State, real.Mine, real.Yours, real.Multiplier, real.DesiredTx = bfd.Down, 99, 0, 3, bfd.SlowTx
			x.beat(hold - time.Millisecond)
			x.hearFrom(foreignPort, real)
			if st := x.look(); st.Remote.Discriminator != x.p.Mine {
				t.Errorf("before %v: %+v", hold, st)
			}
			x.beat(2 * time.Millisecond)
			x.hearFrom(foreignPort, real)
			if st := x.look(); st.Remote.Discriminator != 99 {
				t.Errorf("after %v: %+v", hold, st)
			}
		})
	}
}

// With a key the digest identifies the sender: a restarted neighbour is accepted at once.
func TestKeyedNeighbourHasAnyPort(t *testing.T) {
	x := newNeighbour(t)
	x.s.Key = &bfd.Key{Type: bfd.KeyedSHA1, ID: 7, Secret: []byte("something secret")}
	if err := x.w.put(0, x.s, 2); err != nil {
		t.Fatal(err)
	}
	x.beat(0)
	p := x.p
	p.Mine, p.Auth = 99, &bfdtest.Auth{Type: x.s.Key.Type, KeyID: x.s.Key.ID, Sequence: 1}
	wire := p.Append(nil)
	bfdtest.Seal(x.s.Key, wire)
	x.receive(fromPort(frame(x.s.Peer, x.s.Local, bfdtest.HopLimit, wire), foreignPort))
	if st := x.look(); st.State != bfd.Up || st.Remote.Discriminator != 99 {
		t.Errorf("%+v", st)
	}
}
