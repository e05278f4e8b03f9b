// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/sock"
	"github.com/weir-project/weir/feature/handoff/wire"
	"github.com/weir-project/weir/internal/bounded"
)

// session is a kept socket. Listeners and packet sockets are sessions too, without positions.
type session struct {
	id      uint64
	kind    wire.Kind
	fd      int // the keeper's duplicate
	service *service
	owner   *member // nil: waits for one
	user    uint32  // user of the owner, or of the last one: see trust.go
	member  string  // name of the owner, or of the last one
	from    *member // sender of the transfer to the owner
	label   string

	read, written uint64   // as last committed
	said          position // by messages
	state, unread []byte
	slot          *slot // the owner's commits; nil: by messages
	allowed       int64 // bytes of state allowed to a session above a lowered limit: the former limit; else 0

	suspension *suspension // suspended, or about to be: see suspend
	crashed    bool        // the last owner died
	refusals   []*member
	refusal    time.Time // time of the latest
	waits      time.Time // start of the wait for a member; zero once a member continues with it
	since      time.Time
	moves      int
	reason     string // why the last transfer was rejected or returned, until it has another owner
	refused    int    // number of rejected transfers

	local, remote netip.AddrPort
}

// address identifies the socket in the log: a connection by its remote address, other sockets by their local one.
func (s *session) address() slog.Attr {
	if s.kind == wire.Stream {
		return slog.Any("remote", s.remote)
	}
	return slog.Any("local", s.local)
}

// ends is the log message for a socket dropped for good.
func (s *session) ends() string {
	if s.kind == wire.Stream {
		return "session is reset"
	}
	return "socket is closed"
}

// request processes a member's request. left are the unused descriptors. k.mu is held.
func (k *Keeper) request(m *member, msg *wire.Message, fds []int) (answer *wire.Message, left []int, err error) {
	if k.closed {
		return nil, fds, wire.Errorf(wire.NoSession, "the keeper is exiting")
	}
	switch msg.Type {
	case wire.Ready:
		answer = k.readiness(m, msg.Number)
	case wire.Load:
		k.load(m, msg.Number)
	case wire.Agree:
		k.agreed(m, msg.Number)
	case wire.Leave:
		k.ready(m, false)
		k.orphan(m, false)
	case wire.Keep:
		fds, err = k.keep(m, msg, fds)
	case wire.Commit:
		err = k.commit(m, msg)
	case wire.Commits:
		err = k.commits(m, msg)
	case wire.Drop:
		var s *session
		if s, err = m.session(msg); err == nil {
			k.remove(s, false)
		}
	case wire.Transfer:
		err = k.transfer(m, msg)
	case wire.Accept:
		k.accepted(m, msg.Session)
	case wire.Reject:
		err = k.reject(m, msg)
	case wire.Find:
		err = k.find(m, msg)
		if err == nil {
			msg.Seq = 0 // answered with Give
		}
	default:
		err = wire.Errorf(wire.Malformed, "unknown request type %#x", uint8(msg.Type))
	}
	return answer, fds, err
}

// session returns the session of a message, if the member owns it.
func (m *member) session(msg *wire.Message) (*session, error) {
	s := m.sessions[msg.Session]
	if s == nil {
		return nil, wire.Errorf(wire.NoSession, "session %d is not kept for this member", msg.Session)
	}
	return s, nil
}

// keep starts keeping a socket.
func (k *Keeper) keep(m *member, msg *wire.Message, fds []int) ([]int, error) {
	if len(fds) == 0 {
		return fds, wire.Errorf(wire.BadSocket, "keep without a descriptor")
	}
	kind := wire.Kind(msg.Number)
	if err := sock.Check(fds[0], kind); err != nil {
		return fds, wire.Errorf(wire.BadSocket, "%v", err)
	}
	if c, err := sock.Cookie(fds[0]); err != nil || c != msg.Session {
		return fds, wire.Errorf(wire.BadSocket, "the socket's cookie is %d (%v), the session's number %d", c, err, msg.Session)
	}
	if s := k.sessions[msg.Session]; s != nil {
		if s.owner != m && !(s.owner != nil && s.owner.disconnected() && s.owner.process.same(m.process) && s.service == m.service) {
			return fds, wire.Errorf(wire.Owned, "session %d belongs to member %s", s.id, s.member)
		}
		k.assign(s, m)
		s.waits = time.Time{}
		return fds, k.update(m, s, msg)
	}
	if err := k.admits(m, fds[0]); err != nil {
		return fds, err
	}
	s := &session{id: msg.Session, kind: kind, fd: -1, service: m.service, user: m.process.UID, label: msg.Text, since: time.Now(),
		said: position{msg.Read, msg.Written}}
	if err := k.update(m, s, msg); err != nil {
		return fds, err
	}
	s.fd = fds[0]
	s.local, s.remote = m.ends[0], m.ends[1]
	k.sessions[s.id], s.service.sessions[s.id] = s, s
	k.charge(s, 0, 1)
	k.assign(s, m)
	m.service.counts.Kept++
	return fds[1:], nil
}

// commit records the position and state of a session.
func (k *Keeper) commit(m *member, msg *wire.Message) error {
	s, err := m.session(msg)
	if err != nil {
		return err
	}
	m.service.counts.Commits++
	return k.update(m, s, msg)
}

// update applies the positions and state of a message, completely or not at all.
func (k *Keeper) update(m *member, s *session, msg *wire.Message) error {
	// A slot may have been read at a later commit than a message still in flight.
	if err := s.advances(msg); err != nil {
		return err
	}
	size := int64(len(msg.State) + len(msg.Unread))
	if msg.Flags&wire.KeepState != 0 {
		if s.slot != nil {
			return wire.Errorf(wire.Malformed, "session %d commits in a slot of the board: send the complete state in a message", s.id)
		}
		size += int64(len(s.state))
	}
	if size > k.largest(m, s) {
		s.service.counts.OverLimit++
		return wire.Errorf(wire.Limit, "%d bytes of state and unread; this keeper keeps at most %d", size, m.limit)
	}
	if err := k.fits(m, s, size); err != nil {
		return err
	}
	if size > k.MaxState {
		s.allowed = max(s.allowed, m.limit)
	} else {
		s.allowed = 0
	}
	s.said = position{msg.Read, msg.Written}
	k.stand(s, msg, nil)
	return nil
}

// position is a session's position, as in a message.
type position struct{ read, written uint64 }

// advances returns an error if a message's positions lie before the last ones.
func (s *session) advances(msg *wire.Message) error {
	said := s.said
	if wire.Before(msg.Read, said.read) || wire.Before(msg.Written, said.written) {
		return wire.Errorf(wire.Malformed, "session %d goes back: from read %d, written %d to %d, %d", s.id, said.read, said.written, msg.Read, msg.Written)
	}
	return nil
}

// stand sets a session's positions and state from a message.
func (k *Keeper) stand(s *session, msg *wire.Message, in *slot) {
	was := s.weight()
	s.slot = in
	if msg.Flags&wire.KeepState == 0 {
		s.state = refill(s.state, msg.State)
	}
	s.read, s.written, s.unread = msg.Read, msg.Written, refill(s.unread, msg.Unread)
	k.charge(s, s.weight()-was, 0)
}

// refill copies b into the memory of old, unless that is far too large.
func refill(old, b []byte) []byte {
	if cap(old) > 4*len(b)+256 {
		old = nil
	}
	return append(old[:0], b...)
}

// size returns the bytes of a session's state.
func (s *session) size() int64 { return int64(len(s.state) + len(s.unread)) }

// weight returns the bytes charged for a session.
func (s *session) weight() int64 {
	if s.slot != nil {
		return s.slot.reserved
	}
	return s.size()
}

// transfer changes the owner of a session. The change is atomic under k.mu: a session never has two owners or none.
func (k *Keeper) transfer(m *member, msg *wire.Message) error {
	s, err := m.session(msg)
	if err != nil {
		return err
	}
	if s.suspension != nil {
		return k.transferSuspended(m, s, msg)
	}
	to, err := k.peer(m, msg.Name, time.Now())
	if err == nil {
		err = movable(s, msg.Read)
	}
	if err == nil {
		err = k.update(m, s, msg)
	}
	if err != nil {
		s.stays(err.Error())
		return err
	}
	s.from, s.crashed, s.refusals, s.reason, s.waits = m, false, nil, "", time.Time{}
	s.moves++
	m.service.counts.Transfers++
	k.giveTo(to, s, wire.Message{Name: m.name})
	return nil
}

// transferSuspended takes a session from its owner to suspend it, see suspend.
func (k *Keeper) transferSuspended(m *member, s *session, msg *wire.Message) error {
	err := movable(s, msg.Read)
	if err == nil {
		err = k.update(m, s, msg)
	}
	if err != nil {
		s.stays(err.Error())
		k.unpark(s, wire.Errorf(wire.Lost, "session %d stays with its member: %v", s.id, err))
		return err
	}
	s.from, s.crashed, s.refusals, s.reason = m, false, nil, ""
	k.confirmSuspended(s)
	return nil
}

// stays records why a session could not change its owner.
func (s *session) stays(why string) {
	s.service.counts.Rejected++
	s.refused++
	s.reason = why
}

// movable returns an error if a session must stay with its owner. Its position is unreadable after both ends have
// closed, and only the owner has uncommitted data.
func movable(s *session, read uint64) error {
	if s.kind != wire.Stream {
		return nil
	}
	p, err := s.positions()
	switch {
	case errors.Is(err, sock.ErrClosed):
		return wire.Errorf(wire.Lost, "the connection is closed: read it to its end, and close it")
	case err != nil:
		return wire.Errorf(wire.Lost, "%v", err)
	case wire.Before(read, p.Read):
		hint := ""
		if !sock.IsInline(s.fd) {
			hint = ": an urgent byte (MSG_OOB) counts as one unless the member sets SO_OOBINLINE"
		}
		return wire.Errorf(wire.Lost, "%d bytes were read and not committed%s", p.Read-read, hint)
	}
	return nil
}

// peer returns the destination of a transfer: the youngest member of a name. For the name "" it is the local member
// with the fewest sessions; agents of other servers must be named.
func (k *Keeper) peer(m *member, name string, now time.Time) (*member, error) {
	var best, slow *member
	strange := false
	for _, o := range m.service.members {
		if o != m && o.ready && o.name == name && !m.gives(o) {
			strange = true
			continue
		}
		if o == m || !o.ready || !m.gives(o) || name != "" && o.name != name || name == "" && wire.Elsewhere(o.name) {
			continue
		}
		if o.slow(now) {
			slow = o
			continue
		}
		if o.standby && (name == "" || best != nil && !best.standby) {
			continue
		}
		if best == nil || name != "" || len(o.sessions) < len(best.sessions) {
			best = o
		}
	}
	switch {
	case best != nil:
		return best, nil
	case slow != nil:
		return nil, wire.Errorf(wire.Slow, "member %s (process %d) of %s does not answer for its given sessions", slow.name, slow.process.PID, m.service.name)
	case strange:
		return nil, wire.Errorf(wire.NoPeer, "member %s of %s belongs to another user: only root may send it sessions of user %d", name, m.service.name, m.process.UID)
	case name == "":
		return nil, wire.Errorf(wire.NoPeer, "no other member of %s is ready", m.service.name)
	}
	return nil, wire.Errorf(wire.NoPeer, "no member %s of %s is ready besides", name, m.service.name)
}

// slow reports whether a member leaves given sessions unanswered, or does not read.
func (m *member) slow(now time.Time) bool {
	if m.looked != now { // evaluated once for all sessions of a search
		m.looked, m.late = now, m.owesSince(now.Add(-slowTime))
	}
	return m.hangs || m.late || len(m.queue) >= maxQueue/2
}

// owesSince reports whether a member has left something given before then unanswered.
func (m *member) owesSince(then time.Time) bool {
	for _, since := range m.given {
		if since.Before(then) {
			return true
		}
	}
	return false
}

// giveTo assigns a session to a member, and sends it.
func (k *Keeper) giveTo(m *member, s *session, msg wire.Message) {
	k.assign(s, m)
	m.given[s.id] = time.Now()
	msg.Type, msg.Session, msg.Read, msg.Written, msg.Number, msg.Text = wire.Give, s.id, s.read, s.written, uint32(s.kind), s.label
	if s.crashed {
		msg.Flags |= wire.Crashed
	}
	k.post(m, outgoing{message: msg, gives: s})
}

// assign makes m the owner. With nil the session waits for a member.
func (k *Keeper) assign(s *session, m *member) {
	k.disown(s)
	s.owner = m
	if m == nil {
		if s.waits.IsZero() { // otherwise it continues an earlier wait, after a rejection
			s.waits = time.Now()
		}
		s.service.orphans[s] = true
		return
	}
	s.member = m.name
	k.belongs(s, m.process.UID)
	m.sessions[s.id] = s
	delete(s.service.orphans, s)
}

func (k *Keeper) disown(s *session) {
	m := s.owner
	if m == nil {
		return
	}
	_ = k.catchUp(s) // orphan has checked that it succeeds
	k.slotless(s)
	delete(m.sessions, s.id)
	delete(m.given, s.id)
	if m.gone && len(m.sessions) == 0 {
		m.released()
	}
}

// remove stops keeping a session. With reset it resets the session itself.
func (k *Keeper) remove(s *session, reset bool) {
	k.unpark(s, wire.Errorf(wire.NoSession, "session %d has ended", s.id))
	k.slotless(s)
	k.disown(s)
	delete(k.sessions, s.id)
	delete(s.service.sessions, s.id)
	delete(s.service.orphans, s)
	k.charge(s, -s.weight(), -1)
	switch {
	case s.fd < 0:
	case s.kind == wire.Packet || listens(s.fd): // neither lingers, and its address is free before the answer
		unix.Close(s.fd)
	default:
		wire.CloseKept(s.party(), s.fd, reset && s.kind == wire.Stream)
	}
}

// ends are a socket's local and remote addresses.
type ends [2]netip.AddrPort

// socketEnds reads the addresses of a passed socket. The process can hold the socket's lock, so k.mu must not be
// held.
func socketEnds(p *process, fd int) (ends, error) {
	e, err := bounded.Do(party(p.UID, "process", uint64(p.PID)), func() (e ends, err error) {
		e[0], e[1] = sock.Addresses(fd)
		return e, nil
	}, nil)
	if err != nil {
		err = wire.Errorf(wire.BadSocket, "cannot read the socket's addresses: %v", err)
	}
	return e, err
}

// positions reads the positions of the session's socket. It gives up if the owner holds the socket's lock.
func (s *session) positions() (sock.Positions, error) {
	return bounded.Do(s.party(), func() (sock.Positions, error) { return sock.ReadPositions(s.fd) }, nil)
}

// party names the user whose processes can block calls on the session's socket.
func (s *session) party() string { return party(s.user, "session", s.id) }

// party returns a user's name for package bounded. Root's processes and sessions are separate parties, because they
// may act for different users.
func party(uid uint32, what string, id uint64) string {
	if uid == 0 {
		return fmt.Sprintf("%s %d", what, id)
	}
	return bounded.User(uid)
}

// listens reports whether a socket is still a listener: its owner can turn it into a connection.
func listens(fd int) bool {
	n, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
	return err == nil && n != 0
}
