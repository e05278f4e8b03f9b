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

// tables are the maps of a network namespace's sessions. A place is a session's index in them.
type tables struct {
	setups, states, hops, echoes, mine, peers, clock *ebpf.Map
}

// errTaken says that there is another session of the same discriminator, or with the same neighbour on the same device.
var errTaken = errors.New("there is such a session already")

// put makes a session at a place that is free, or changes what is there: generation is not that of any session before it.
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
		// By chance, or packets of an earlier session would be good for this one: RFC 5880, 6.8.1, bfd.XmitAuthSeq.
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
	// What is written is not read as a whole: first all of it, which the programs do not go by before the generation says so.
	first := r
	first.Generation = old.Generation
	return errors.Join(t.setups.Put(place, first), t.setups.Put(place, r), t.reach())
}

// down takes the session at a place down, administratively.
func (t tables) down(place uint32) error {
	var c bpf.BfdBfdSetup
	if err := t.setups.Lookup(place, &c); err != nil {
		return fmt.Errorf("reading the session at place %d: %w", place, err)
	}
	// As in put: a program that saw the generation alone would not look again.
	c.Down = 1
	if err := t.setups.Put(place, c); err != nil {
		return err
	}
	kernel.Step("bfd:down")
	c.Generation++
	return t.setups.Put(place, c)
}

// enter has packets find the session.
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

// remove ends a session without a word to the other end: shut it down before.
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

// reach has ticks look as far as there are sessions.
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

// tick says how often there are ticks, at least.
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
