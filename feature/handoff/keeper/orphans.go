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

// readiness does what Ready asks for.
func (k *Keeper) readiness(m *member, number uint32) (answer *wire.Message) {
	if number == wire.ReadyEnds {
		return k.ends(m)
	}
	if number&wire.ReadyMoves != 0 {
		m.caps |= wire.Moves
	}
	m.standby = number&wire.ReadyStandby != 0 && m.caps&wire.Standby != 0
	if m.standby && !m.ready { // it comes from another keeper: its successor is given time for that, too
		m.patient = time.Now().Add(missedTime)
	}
	m.alone = m.alone && !m.standby
	k.ready(m, number != 0)
	return nil
}

// ready opens or closes a member for sessions.
func (k *Keeper) ready(m *member, yes bool) {
	was, now := m.ready, time.Now()
	m.ready, m.standby = yes, m.standby && yes
	if !was { // also one that is replaced, and is to get no more: it has said what it has
		m.readied = now
	}
	k.tellMembers(m.service)
	if yes && !was && !m.standby {
		k.replace(m)
	}
	k.tellAlone(m.service, now)
	k.assignOrphans(m.service, now)
}

// orphan takes a member's sessions from it: it died, or says that it leaves them.
func (k *Keeper) orphan(m *member, died bool) {
	for _, s := range m.sessions {
		s.crashed = died
		s.from, s.refusals = nil, nil // a successor that had no room may have some by now
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

// missed finds others for what was given to a process whose connection ended before it had read that, or could take it: for want
// of descriptors, say. It lives, has come back, and goes on with what it has, so what it does not keep then it has never had.
func (k *Keeper) missed(v *service, now time.Time) {
	for m := range v.unanswered {
		i := slices.IndexFunc(v.members, func(o *member) bool {
			return o.name == m.name && o.serial > m.serial && !o.readied.IsZero() && o.process.same(m.process)
		})
		switch {
		case len(m.given) == 0: // kept again, or over
			delete(v.unanswered, m)
			continue
		case i < 0, now.Sub(v.members[i].readied) < missedTime, now.Sub(m.ended) < missedTime:
			continue
		}
		delete(v.unanswered, m)
		for id := range m.given {
			s := k.sessions[id]
			k.Log.Warn("a session was not received", "service", v.name, "member", m.name, "pid", m.process.PID, s.address())
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

// giveOn has a session go back to whom it came from, or wait for another.
func (k *Keeper) giveOn(s *session, refused string) {
	if back := s.from; back != nil && !back.gone && back.ready && !slices.Contains(s.refusals, back) {
		s.from = nil
		k.giveTo(back, s, wire.Message{Name: refused, Flags: wire.Returned})
		return
	}
	k.assign(s, nil)
}

// errGap says that bytes were taken out of a session that no state accounts for.
var errGap = errors.New("bytes were read or written that were not committed first")

// whole says why nobody can go on with a session where its state stands. What was
// read after the last commit is lost with the process that read it.
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

// lose ends a session that nobody can go on with.
func (k *Keeper) lose(s *session, why error) {
	c := &s.service.counts
	switch {
	case errors.Is(why, sock.ErrClosed):
		c.Closed++
	default:
		c.Gaps++
		k.Log.Warn(s.ends(), "service", s.service.name, "member", s.member, s.address(), "reason", why)
	}
	k.remove(s, true)
}

// assignOrphans gives orphans to members that are there for them.
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
			s.reason = "" // it has not come back to where it was
		}
		k.giveTo(m, s, wire.Message{Name: s.member})
	}
}

// successor is who goes on with an orphan: the youngest of its name, one that stands by last, after a time of grace
// whoever takes those of others and has the fewest. One that an agent was moving is for
// agents alone, however long they are away: to its application it would be a socket that
// stands still, and perhaps a second copy of what lives on another server by now.
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

// expire ends orphans that have waited for too long. Others are offered again to members that have refused them: the reason, a
// lack of descriptors, passes.
func (k *Keeper) expire(v *service, now time.Time) {
	for s := range v.orphans {
		if now.Sub(s.waits) >= k.Hold {
			v.counts.Expired++
			k.Log.Warn(s.ends()+": no member came for it", "service", v.name, "member", s.member, s.address(), "waited", k.Hold)
			k.remove(s, true)
			continue
		}
		if len(s.refusals) > 0 && now.Sub(s.refusal) >= againTime {
			s.refusals = nil
		}
	}
}

// accepted notes that a member goes on with what it was given.
func (k *Keeper) accepted(m *member, id uint64) {
	if s := m.sessions[id]; s != nil {
		s.waits = time.Time{}
	}
	delete(m.given, id)
}

// reject has a session that a member does not want go back, or to another.
func (k *Keeper) reject(m *member, msg *wire.Message) error {
	s, err := m.session(msg)
	if err != nil {
		return err
	}
	if _, ok := m.given[s.id]; !ok {
		return wire.Errorf(wire.NoSession, "session %d was taken already: transfer it, or drop it", s.id)
	}
	s.refusals, s.refusal = append(s.refusals, m), time.Now()
	s.stays(cmp.Or(msg.Text, "no reason given"))
	k.giveOn(s, m.name)
	k.assignOrphans(m.service, time.Now())
	return nil
}

// find gives a member the listener or packet socket that one of its name has had, or
// has: for a while the old and the new one share it.
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
