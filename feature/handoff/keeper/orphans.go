// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"cmp"
	"errors"
	"slices"
	"time"

	"github.com/weir-project/weir/feature/handoff/sock"
	"github.com/weir-project/weir/feature/handoff/wire"
)

// readiness processes Ready.
func (k *Keeper) readiness(m *member, number uint32) (answer *wire.Message) {
	if number == wire.ReadyEnds {
		return k.ends(m)
	}
	if number&wire.ReadyMoves != 0 {
		m.caps |= wire.Moves
	}
	m.standby = number&wire.ReadyStandby != 0 && m.caps&wire.Standby != 0
	if m.standby && !m.ready { // it comes from another keeper: give its successor time to reconnect, too
		m.patient = time.Now().Add(missedTime)
	}
	m.alone = m.alone && !m.standby
	k.ready(m, number != 0)
	return nil
}

// ready starts or stops giving sessions to a member.
func (k *Keeper) ready(m *member, yes bool) {
	was, now := m.ready, time.Now()
	m.ready, m.standby = yes, m.standby && yes
	if !was { // also for a replaced member without further sessions: it has announced its sessions
		m.readied = now
	}
	k.tellMembers(m.service)
	if yes && !was && !m.standby {
		k.replace(m)
	}
	k.tellAlone(m.service, now)
	k.assignOrphans(m.service, now)
}

// orphan takes a member's sessions from it, after its death or its Leave.
func (k *Keeper) orphan(m *member, died bool) {
	for _, s := range m.sessions {
		s.crashed = died
		s.from, s.refusals = nil, nil // members that rejected it may have room by now
		err := k.catchUp(s)
		k.slotless(s)
		if err == nil {
			err = whole(s)
		}
		if err != nil {
			k.lose(s, err)
			continue
		}
		if s.suspension != nil {
			k.confirmSuspended(s)
			continue
		}
		k.assign(s, nil)
	}
	k.assignOrphans(m.service, time.Now())
}

// missed finds other members for sessions given to a process that disconnected before accepting them, for example for
// want of descriptors. The process has reconnected and announced its sessions. It never received the sessions missing
// from them.
func (k *Keeper) missed(v *service, now time.Time) {
	for m := range v.unanswered {
		i := slices.IndexFunc(v.members, func(o *member) bool {
			return o.name == m.name && o.serial > m.serial && !o.readied.IsZero() && o.process.same(m.process)
		})
		switch {
		case len(m.given) == 0: // kept again, or ended
			delete(v.unanswered, m)
			continue
		case i < 0, now.Sub(v.members[i].readied) < missedTime, now.Sub(m.ended) < missedTime:
			continue
		}
		delete(v.unanswered, m)
		for id := range m.given {
			s := k.sessions[id]
			k.Log.Warn("session not received", "service", v.name, "member", m.name, "pid", m.process.PID, s.address())
			s.refusals, s.refusal = append(s.refusals, m), now
			s.stays("it was not received")
			switch {
			case s.suspension != nil:
				k.confirmSuspended(s)
			default:
				k.giveOn(s, m.name)
			}
		}
		k.assignOrphans(v, now)
	}
}

// giveOn returns a session to its sender, or makes it an orphan.
func (k *Keeper) giveOn(s *session, refused string) {
	if back := s.from; back != nil && !back.gone && back.ready && !slices.Contains(s.refusals, back) {
		s.from = nil
		k.giveTo(back, s, wire.Message{Name: refused, Flags: wire.Returned})
		return
	}
	k.assign(s, nil)
}

// errGap means bytes left a session's socket without a commit.
var errGap = errors.New("bytes were read or written, but not committed")

// whole returns an error if a session cannot continue from its committed state. Data read after the last commit is
// lost with the process.
func whole(s *session) error {
	if s.kind != wire.Stream {
		return nil
	}
	p, err := s.positions()
	switch {
	case err != nil:
		return err
	case wire.Before(s.read, p.Read), wire.Before(p.Written, s.written):
		return errGap
	}
	return nil
}

// lose ends a session that cannot continue.
func (k *Keeper) lose(s *session, why error) {
	c := &s.service.counts
	switch {
	case errors.Is(why, sock.ErrClosed):
		c.Closed++
	default:
		c.Gaps++
		k.Log.Warn(s.ends(), "service", s.service.name, "member", s.member, s.address(), "err", why)
	}
	k.remove(s, true)
}

// assignOrphans gives orphans to suitable members.
func (k *Keeper) assignOrphans(v *service, now time.Time) {
	for s := range v.orphans {
		m := k.successor(s, now)
		if m == nil {
			continue
		}
		s.moves++
		if s.crashed {
			v.counts.Rescued++
		} else {
			v.counts.Inherited++
		}
		if s.from == nil || s.from.name != m.name || !s.from.process.same(m.process) {
			s.reason = "" // it has not returned to its former process
		}
		k.giveTo(m, s, wire.Message{Name: s.member})
	}
}

// successor returns the member to continue an orphan, or nil. It prefers the youngest member of the orphan's name,
// then one standing by. After the grace time it is the member with the fewest sessions that takes orphans of other
// names. An orphan with a move under way is for agents only, however long they are away. For an application it would
// be a stopped socket, and perhaps the second copy of a session on another server.
func (k *Keeper) successor(s *session, now time.Time) *member {
	var other, standby *member
	takes := wire.TakesOrphans
	if wire.Moving(s.state) {
		takes = wire.Resumes
	}
	members := s.service.members
	for i := len(members) - 1; i >= 0; i-- {
		m := members[i]
		switch {
		case !m.ready || !m.accepts(s) || slices.Contains(s.refusals, m) || m.slow(now):
		case m.name == s.member && m.standby:
			standby = cmp.Or(standby, m)
		case m.name == s.member:
			return m
		case m.standby:
		case m.caps&takes != 0 && (other == nil || len(m.sessions) < len(other.sessions)):
			other = m
		}
	}
	if standby != nil {
		return standby
	}
	if now.Sub(s.waits) < k.Grace {
		return nil
	}
	return other
}

// expire ends orphans that have waited for Hold. It offers others again to members that have rejected them, because
// the usual reason, a lack of descriptors, is temporary.
func (k *Keeper) expire(v *service, now time.Time) {
	for s := range v.orphans {
		if now.Sub(s.waits) >= k.Hold {
			v.counts.Expired++
			k.Log.Warn(s.ends()+": no member in time", "service", v.name, "member", s.member, s.address(), "waited", k.Hold)
			k.remove(s, true)
			continue
		}
		if len(s.refusals) > 0 && now.Sub(s.refusal) >= againTime {
			s.refusals = nil
		}
	}
}

// accepted records that a member continues with a given session.
func (k *Keeper) accepted(m *member, id uint64) {
	if s := m.sessions[id]; s != nil {
		s.waits = time.Time{}
	}
	delete(m.given, id)
}

// reject returns a rejected session to its sender, or gives it to another member.
func (k *Keeper) reject(m *member, msg *wire.Message) error {
	s, err := m.session(msg)
	if err != nil {
		return err
	}
	if _, ok := m.given[s.id]; !ok {
		return wire.Errorf(wire.NoSession, "session %d was accepted already: transfer it, or drop it", s.id)
	}
	s.refusals, s.refusal = append(s.refusals, m), time.Now()
	s.stays(cmp.Or(msg.Text, "no reason given"))
	k.giveOn(s, m.name)
	k.assignOrphans(m.service, time.Now())
	return nil
}

// find gives a member the listener or packet socket of a predecessor or a live member of its name. The old and the
// new member share it for a while.
func (k *Keeper) find(m *member, msg *wire.Message) error {
	for _, s := range m.service.sessions {
		if s.kind != wire.Kind(msg.Number) || s.kind == wire.Stream || s.label != msg.Text || s.member != m.name || !m.accepts(s) {
			continue
		}
		k.giveTo(m, s, wire.Message{Name: s.member, Seq: msg.Seq})
		return nil
	}
	return wire.Errorf(wire.NotFound, "no %s %q of member %s is kept", wire.Kind(msg.Number), msg.Text, m.name)
}
