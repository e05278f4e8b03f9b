// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"cmp"
	"context"
	"time"

	"github.com/weir-project/weir/feature/handoff/wire"
)

// suspension blocks a session while its server changes. After the owner has released the session, no process uses it
// until the suspension ends. The peer's data waits in the socket.
type suspension struct {
	by        *member // the requester, a connection that need not be a member's
	seq       uint32  // of the request, answered when the session is suspended
	suspended bool    // the owner has released it
	since     time.Time
}

// suspendTime is the maximum duration of a suspension. Its requester may have died, or hang.
const suspendTime = 3 * time.Second

// suspend suspends a session. The answer is OK once no process uses the session any more.
func (k *Keeper) suspend(ctx context.Context, m *member, msg *wire.Message) error {
	if err := k.directs(ctx, m, msg.Session, ""); err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	s := k.sessions[msg.Session]
	switch {
	case s == nil || s.kind != wire.Stream:
		return wire.Errorf(wire.NoSession, "no session %d: weir handoff status shows them", msg.Session)
	case s.directs(m.process) != nil:
		return s.directs(m.process)
	case s.suspension != nil:
		return wire.Errorf(wire.Owned, "session %d is being moved by another command", s.id)
	case s.owner != nil && s.owner.gone:
		return wire.Errorf(wire.NoSession, "member %s (process %d) is not connected", s.owner.name, s.owner.process.PID)
	case s.owner != nil && s.owner.caps&wire.Moves == 0:
		return wire.Errorf(wire.Unable, "member %s (process %d) does not move sessions on request", s.owner.name, s.owner.process.PID)
	}
	s.suspension = &suspension{by: m, seq: msg.Seq, since: time.Now()}
	m.parks[s.id] = s
	if s.owner == nil {
		k.confirmSuspended(s)
		return nil
	}
	// The destination is the owner's own name: if it answers too late, it keeps the session.
	k.post(s.owner, outgoing{message: wire.Message{Type: wire.Move, Session: s.id, Name: s.owner.name}})
	return nil
}

// confirmSuspended completes a suspension, and tells its requester.
func (k *Keeper) confirmSuspended(s *session) {
	k.disown(s)
	s.owner, s.waits = nil, time.Now()
	delete(s.service.orphans, s)
	s.suspension.suspended = true
	k.post(s.suspension.by, outgoing{message: wire.Message{Type: wire.OK, Seq: s.suspension.seq, Session: s.id}})
}

// unpark ends a suspension. If it was not complete, the requester gets the error.
func (k *Keeper) unpark(s *session, why *wire.CodeError) {
	p := s.suspension
	if p == nil {
		return
	}
	s.suspension = nil
	delete(p.by.parks, s.id)
	if why != nil && !p.suspended {
		k.post(p.by, outgoing{message: *errorMessage(&wire.Message{Seq: p.seq, Session: s.id}, why)})
	}
}

// release gives a suspended session to a member by name. With "" it returns the session to its former owner. If no
// member of that name is ready, it also returns it, with an error.
func (k *Keeper) release(m *member, msg *wire.Message) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	s := m.parks[msg.Session]
	if s == nil {
		return wire.Errorf(wire.NoSession, "session %d is not suspended by this process", msg.Session)
	}
	return k.letGo(s, msg.Name)
}

func (k *Keeper) letGo(s *session, to string) error {
	held, by := s.suspension.suspended, s.suspension.by
	k.unpark(s, nil)
	if !held {
		return wire.Errorf(wire.Slow, "session %d was not released by its member", s.id)
	}
	back := s.from
	if back != nil && (back.gone || !back.ready) {
		back = nil
	}
	target := s.service.readyNamed(to, time.Now(), s.user, by)
	switch {
	case target != nil && target != back:
		s.moves++
		s.service.counts.Transfers++
		k.giveTo(target, s, wire.Message{Name: s.member})
		return nil
	case back != nil:
		s.from = nil
		k.giveTo(back, s, wire.Message{Name: s.member, Flags: wire.Returned})
	default:
		k.assign(s, nil)
		k.assignOrphans(s.service, time.Now())
	}
	if to != "" && target == nil {
		s.service.counts.Rejected++
		return wire.Errorf(wire.NoPeer, "no member %s of %s is ready", to, s.service.name)
	}
	return nil
}

// readyNamed returns the youngest ready member of a name that may receive a user's sessions on behalf of by.
func (v *service) readyNamed(name string, now time.Time, user uint32, by *member) *member {
	var standby *member
	for i := len(v.members) - 1; i >= 0; i-- {
		if o := v.members[i]; o.name == name && o.ready && !o.slow(now) && (o.process.may(user) || by.process.UID != user && by.process.may(user)) {
			if !o.standby {
				return o
			}
			standby = cmp.Or(standby, o)
		}
	}
	return standby
}

// releaseAll ends the suspensions of a disconnected process.
func (k *Keeper) releaseAll(m *member) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, s := range m.parks {
		k.letGo(s, "")
	}
}

// overdue ends suspensions after suspendTime.
func (k *Keeper) overdue(v *service, now time.Time) {
	for _, s := range v.sessions {
		if s.suspension != nil && now.Sub(s.suspension.since) > suspendTime {
			k.Log.Warn("session suspension timed out", "service", v.name, "member", s.member, s.address(), "waited", suspendTime)
			k.letGo(s, "")
		}
	}
}
