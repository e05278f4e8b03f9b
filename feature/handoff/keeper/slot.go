// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"github.com/weir-project/weir/feature/handoff/wire"
)

// slot is where a session's owner commits without a word to the keeper, which looks there when it has to know: when the owner dies,
// and when somebody asks how things are.
type slot struct {
	board    *wire.BoardReader
	index    uint32
	commits  uint64 // in it that the keeper has counted
	reserved int64  // bytes that count for what it may have
}

// commits notes that a session's commits are in a slot. What is there now says nothing: it may be newer than messages of the same
// session that wait to be read, and another session's if this one has ended since.
func (k *Keeper) commits(m *member, msg *wire.Message) error {
	s, err := m.session(msg)
	if err != nil {
		return err
	}
	if m.board == nil {
		return wire.Errorf(wire.Malformed, "this member has no board: Hello says so with capability %d, and brings it", wire.Boards)
	}
	in := &slot{board: m.board, index: msg.Number, commits: msg.Read, reserved: min(wire.SlotRoom, k.largest(m, s))}
	if err := k.fits(m, s, in.reserved); err != nil {
		return err
	}
	m.service.counts.Commits++
	k.moveTo(s, in)
	return nil
}

// catchUp takes over what a session's owner has committed in its slot.
func (k *Keeper) catchUp(s *session) error {
	if s.slot == nil {
		return nil
	}
	now, n, err := s.slot.board.Read(s.slot.index, s.id)
	if err != nil {
		return wire.Errorf(wire.Malformed, "what it has committed cannot be told: %v", err)
	}
	return k.caughtUp(s, &now, n)
}

func (k *Keeper) caughtUp(s *session, now *wire.Message, commits uint64) error {
	if err := s.advances(now); err != nil {
		return err
	}
	if commits > s.slot.commits { // else its owner has counted wrongly
		s.service.counts.Commits += commits - s.slot.commits
		s.slot.commits = commits
	}
	k.stand(s, now, s.slot)
	return nil
}

// slotless ends that a session's commits are in a slot.
func (k *Keeper) slotless(s *session) {
	k.moveTo(s, nil)
}

// moveTo changes where a session's commits are, and what it counts for.
func (k *Keeper) moveTo(s *session, in *slot) {
	was := s.weight()
	s.slot = in
	k.charge(s, s.weight()-was, 0)
}

// catchUpAll is catchUp of all sessions that somebody who asks may hear of. It reads without the lock: there may be thousands.
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
			continue // it changes all the time, has ended, or is seen to when its owner dies
		}
		k.mu.Lock()
		if l.s.slot == l.at {
			_ = k.caughtUp(l.s, &now, n)
		}
		k.mu.Unlock()
	}
}
