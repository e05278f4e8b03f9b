// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"github.com/weir-project/weir/feature/handoff/wire"
)

// slot is shared memory for a session's commits without messages. The keeper reads it only if needed: when the owner
// dies, and for status reports.
type slot struct {
	board    *wire.BoardReader
	index    uint32
	commits  uint64 // commits counted so far
	reserved int64  // bytes charged for it
}

// commits records that a session's commits are in a slot. The present content is not read. It may be newer than
// queued messages of the session, or belong to another session if this one has ended since.
func (k *Keeper) commits(m *member, msg *wire.Message) error {
	s, err := m.session(msg)
	if err != nil {
		return err
	}
	if m.board == nil {
		return wire.Errorf(wire.Malformed, "this member has no board: send it with Hello, capability %d", wire.Boards)
	}
	in := &slot{board: m.board, index: msg.Number, commits: msg.Read, reserved: min(wire.SlotRoom, k.largest(m, s))}
	if err := k.fits(m, s, in.reserved); err != nil {
		return err
	}
	m.service.counts.Commits++
	k.moveTo(s, in)
	return nil
}

// catchUp applies the owner's latest commit from its slot.
func (k *Keeper) catchUp(s *session) error {
	if s.slot == nil {
		return nil
	}
	now, n, err := s.slot.board.Read(s.slot.index, s.id)
	if err != nil {
		return wire.Errorf(wire.Malformed, "cannot read its commits: %v", err)
	}
	return k.caughtUp(s, &now, n)
}

func (k *Keeper) caughtUp(s *session, now *wire.Message, commits uint64) error {
	if err := s.advances(now); err != nil {
		return err
	}
	if commits > s.slot.commits { // otherwise the owner has miscounted
		s.service.counts.Commits += commits - s.slot.commits
		s.slot.commits = commits
	}
	k.stand(s, now, s.slot)
	return nil
}

// slotless ends the use of a slot for a session's commits.
func (k *Keeper) slotless(s *session) {
	k.moveTo(s, nil)
}

// moveTo changes the slot of a session's commits, and the charge for it.
func (k *Keeper) moveTo(s *session, in *slot) {
	was := s.weight()
	s.slot = in
	k.charge(s, s.weight()-was, 0)
}

// catchUpAll is catchUp for all sessions visible to a reader. It reads without the lock, because there may be
// thousands.
func (k *Keeper) catchUpAll(may func(service string) bool) {
	type look struct {
		s  *session
		at *slot
	}
	var looks []look
	k.mu.Lock()
	for _, s := range k.sessions {
		if s.slot != nil && may(s.service.name) {
			looks = append(looks, look{s, s.slot})
		}
	}
	k.mu.Unlock()
	for _, l := range looks {
		now, n, err := l.at.board.Read(l.at.index, l.s.id)
		if err != nil {
			continue // it changes constantly or has ended; its owner's death is handled later
		}
		k.mu.Lock()
		if l.s.slot == l.at {
			_ = k.caughtUp(l.s, &now, n)
		}
		k.mu.Unlock()
	}
}
