// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/bfd/engine/bpf"
	"github.com/weir-project/weir/feature/reroute/links"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/ringbuf"
)

// Down takes a session down administratively, and the peer learns the reason.
func (e *Engine) Down(discriminator uint32) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	place, there, err := e.findIndex(discriminator)
	if err != nil || !there {
		return err
	}
	return e.tables.down(place)
}

// findIndex returns the place of a session; false: there is none.
func (e *Engine) findIndex(discriminator uint32) (place uint32, there bool, err error) {
	err = e.tables.mine.Lookup(discriminator, &place)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return 0, false, nil
	} else if err != nil {
		return 0, false, fmt.Errorf("reading sessions: %w", err)
	}
	return place, true, nil
}

// Delete ends sessions without telling the peers; Down before tells them. BFD's verdict of their links is cleared.
func (e *Engine) Delete(discriminators ...uint32) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	linked, err := e.end(discriminators)
	return errors.Join(err, e.unlink(linked...))
}

// end removes sessions. linked lists the links they judged. The caller holds mu.
func (e *Engine) end(discriminators []uint32) (linked []int, err error) {
	var errs []error
	for _, d := range discriminators {
		place, there, err := e.findIndex(d)
		if err != nil || !there {
			errs = append(errs, err)
			continue
		}
		var c bpf.BfdBfdSetup
		if err := e.tables.setups.Lookup(place, &c); err != nil {
			errs = append(errs, fmt.Errorf("reading the session at place %d: %w", place, err))
			continue
		}
		if c.Link != 0 {
			linked = append(linked, int(c.Link))
		}
		errs = append(errs, e.tables.remove(place), e.disown(d))
	}
	return linked, errors.Join(errs...)
}

// unlink clears BFD's verdict of links without a session.
func (e *Engine) unlink(ifindexes ...int) error {
	if len(ifindexes) == 0 {
		return nil
	}
	kernel.WaitForPrograms() // No program with a view of the old session may write after this.
	var errs []error
	for _, i := range ifindexes {
		errs = append(errs, links.ClearProbe(e.maps[links.MapName], i))
	}
	return errors.Join(errs...)
}

// SetLink sets the link judged by a session (package links), or 0 for none.
func (e *Engine) SetLink(discriminator uint32, ifindex int) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	place, there, err := e.findIndex(discriminator)
	if err != nil || !there {
		return err
	}
	var c bpf.BfdBfdSetup
	if err := e.tables.setups.Lookup(place, &c); err != nil {
		return fmt.Errorf("reading the session at place %d: %w", place, err)
	}
	was := int(c.Link)
	if was == ifindex {
		return nil
	}
	c.Link = uint32(ifindex)
	c.Generation++
	if err := e.tables.setups.Put(place, c); err != nil || was == 0 {
		return err
	}
	return e.unlink(was)
}

// Move starts a session anew on another device, with its owner. The new device's link starts with the verdict of the
// old one, and a session up on a missing device counts as down.
func (e *Engine) Move(ctx context.Context, discriminator uint32, ifindex int, local netip.Addr) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	place, there, err := e.findIndex(discriminator)
	if err != nil || !there {
		return err
	}
	var c bpf.BfdBfdSetup
	var echo bpf.BfdBfdEcho
	st, _, err := e.tables.status(place)
	if err = errors.Join(err, e.tables.setups.Lookup(place, &c), e.tables.echoes.Lookup(place, &echo)); err != nil {
		return fmt.Errorf("reading the session at place %d: %w", place, err)
	}
	s := Session{Config: bfd.Config{Discriminator: c.Mine, Multiplier: c.Multiplier, Passive: c.Passive != 0, Down: c.Down != 0,
		DesiredTx: duration(c.DesiredTx), RequiredRx: duration(c.RequiredRx), EchoRx: duration(c.EchoRx)},
		Local: local, Peer: address(c.Peer, c.Ipv6 != 0), Ifindex: ifindex, SourcePort: swap(c.SourcePort), Echo: duration(echo.Wanted)}
	if c.Link != 0 {
		s.Link, s.LinkDown = ifindex, st.LinkDown || st.BeenUp
	}
	if err := e.tables.remove(place); err != nil {
		return err
	}
	if c.Link != 0 {
		if err := e.unlink(int(c.Link)); err != nil {
			return err
		}
	}
	return e.putLocked(func() error { return e.recover(ctx) }, []Session{s})
}

func duration(micros uint32) time.Duration { return time.Duration(micros) * time.Microsecond }

// Status returns the session of a discriminator; false: there is none.
func (e *Engine) Status(discriminator uint32) (Status, bool, error) {
	place, there, err := e.findIndex(discriminator)
	if err != nil || !there {
		return Status{}, false, err
	}
	return e.tables.status(place)
}

// Identity identifies the two ends of a session.
type Identity struct {
	Ifindex     int
	Local, Peer netip.Addr
}

// Sessions returns the current sessions by discriminator.
func (e *Engine) Sessions() (map[uint32]Identity, error) {
	out := map[uint32]Identity{}
	err := e.each(func(_ uint32, c *bpf.BfdBfdSetup) {
		out[c.Mine] = identity(c)
	})
	return out, err
}

func identity(c *bpf.BfdBfdSetup) Identity {
	return Identity{Ifindex: int(c.Ifindex), Local: address(c.Local, c.Ipv6 != 0), Peer: address(c.Peer, c.Ipv6 != 0)}
}

// Changes calls yield with the discriminator of each session with a new state or new values from the peer. It ends
// when ctx is done or yield returns false. Changes beyond the buffer are lost.
func (e *Engine) Changes(ctx context.Context, yield func(discriminator uint32) bool) error {
	r, err := ringbuf.Open[bpf.BfdBfdEvent](e.maps["events"])
	if err != nil {
		return fmt.Errorf("reading BFD's changes: %w", err)
	}
	defer r.Close()
	for c, err := range r.Events(ctx) {
		switch {
		case errors.Is(err, ringbuf.ErrShort): // another version's event
		case err != nil:
			return fmt.Errorf("reading BFD's changes: %w", err)
		case !yield(c.Mine):
			return nil
		}
	}
	return nil
}
