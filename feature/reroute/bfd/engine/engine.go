// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/reroute/bfd/engine/bpf"
	"github.com/weir-project/weir/kernel"
)

// tables are the maps of a network namespace's sessions. A place is the index of a session.
type tables struct {
	setups, states, hops, echoes, mine, peers, clock *ebpf.Map
}

// errTaken reports a second session with one discriminator, or with one neighbour on one device.
var errTaken = errors.New("such a session exists already")

// put creates a session at a free place, or changes the one there. generation must differ from every earlier
// session's.
func (t tables) put(place uint32, s *Session, generation uint32) error {
	var old bpf.BfdBfdSetup
	if err := t.setups.Lookup(place, &old); err != nil {
		return fmt.Errorf("reading the session at place %d: %w", place, err)
	}
	r := s.raw(generation)
	if old.Generation != 0 && (old.Mine != r.Mine || old.Ifindex != r.Ifindex || old.Peer != r.Peer || old.Local != r.Local) {
		return fmt.Errorf("place %d has the session with discriminator %d: delete it first", place, old.Mine)
	}
	if old.Generation == 0 {
		// Random, so packets of an earlier session are not valid for this one: RFC 5880 section 6.8.1,
		// bfd.XmitAuthSeq.
		begin := bpf.BfdBfdState{SentSequence: rand.Uint32()}
		if s.LinkDown {
			begin.WasUp = hasBeenUp
		}
		err := errors.Join(t.states.Put(place, begin), t.hops.Put(place, make([]byte, t.hops.ValueSize())), t.enter(place, &r))
		if err != nil {
			return err
		}
	}
	var echo bpf.BfdBfdEcho
	if err := t.echoes.Lookup(place, &echo); err != nil {
		return fmt.Errorf("reading the echo function of the session at place %d: %w", place, err)
	}
	if wanted := micros(s.Echo); old.Generation == 0 || echo.Wanted != wanted {
		if err := t.echoes.Put(place, bpf.BfdBfdEcho{Wanted: wanted}); err != nil {
			return err
		}
	}
	// The programs do not read the setup atomically. So write all fields with the old generation first, then the new
	// generation.
	first := r
	first.Generation = old.Generation
	return errors.Join(t.setups.Put(place, first), t.setups.Put(place, r), t.reach())
}

// down takes a session down administratively.
func (t tables) down(place uint32) error {
	var c bpf.BfdBfdSetup
	if err := t.setups.Lookup(place, &c); err != nil {
		return fmt.Errorf("reading the session at place %d: %w", place, err)
	}
	// As in put: a program seeing the new generation first would not read again.
	c.Down = 1
	if err := t.setups.Put(place, c); err != nil {
		return err
	}
	kernel.Step("bfd:down")
	c.Generation++
	return t.setups.Put(place, c)
}

// enter makes the session findable for packets.
func (t tables) enter(place uint32, r *bpf.BfdBfdSetup) error {
	from := bpf.BfdBfdFrom{Ifindex: r.Ifindex, Peer: r.Peer}
	for m, key := range map[*ebpf.Map]any{t.mine: r.Mine, t.peers: from} {
		var at uint32
		if err := m.Lookup(key, &at); err == nil && at != place {
			return fmt.Errorf("%w: at place %d", errTaken, at)
		}
	}
	return errors.Join(t.mine.Put(r.Mine, place), t.peers.Put(from, place))
}

// remove removes a session without telling the peer. Call down before to tell it.
func (t tables) remove(place uint32) error {
	var c bpf.BfdBfdSetup
	if err := t.setups.Lookup(place, &c); err != nil || c.Generation == 0 {
		return err
	}
	err := errors.Join(t.setups.Put(place, bpf.BfdBfdSetup{}), t.echoes.Put(place, bpf.BfdBfdEcho{}))
	for m, key := range map[*ebpf.Map]any{t.mine: c.Mine, t.peers: bpf.BfdBfdFrom{Ifindex: c.Ifindex, Peer: c.Peer}} {
		if e := m.Delete(key); !errors.Is(e, ebpf.ErrKeyNotExist) {
			err = errors.Join(err, e)
		}
	}
	return errors.Join(err, t.reach())
}

// reach sets the number of places to visit in a tick.
func (t tables) reach() error {
	var clock bpf.BfdBfdClockwork
	var c bpf.BfdBfdSetup
	if err := t.clock.Lookup(uint32(0), &clock); err != nil {
		return err
	}
	clock.Sessions = 0
	for place := range uint32(maxSessions) {
		if err := t.setups.Lookup(place, &c); err != nil {
			return err
		}
		if c.Generation != 0 {
			clock.Sessions = place + 1
		}
	}
	return t.clock.Put(uint32(0), clock)
}

// tick records the longest time between ticks.
func (t tables) tick(tick time.Duration) error {
	var clock bpf.BfdBfdClockwork
	if err := t.clock.Lookup(uint32(0), &clock); err != nil || clock.Tick == micros(tick) {
		return err
	}
	clock.Tick = micros(tick)
	return t.clock.Put(uint32(0), clock)
}

// status reads a session; false: there is none.
func (t tables) status(place uint32) (Status, bool, error) {
	var c bpf.BfdBfdSetup
	var s bpf.BfdBfdState
	var e bpf.BfdBfdEcho
	if err := errors.Join(t.setups.Lookup(place, &c), t.states.Lookup(place, &s), t.echoes.Lookup(place, &e)); err != nil {
		return Status{}, false, err
	}
	return newStatus(&c, &s, &e), c.Generation != 0, nil
}
