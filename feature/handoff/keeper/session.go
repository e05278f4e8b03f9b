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

// session is a socket that is kept. Listeners and packet sockets are sessions too,
// without positions.
type session struct {
	id      uint64
	kind    wire.Kind
	fd      int // our duplicate
	service *service
	owner   *member // nil: waits for one
	user    uint32  // of the owner, or of the last one: see trust.go
	member  string  // name of the owner, or of the last one
	from    *member // who transferred it to the owner
	label   string

	read, written uint64   // as committed last
	said          position // by messages
	state, unread []byte
	slot          *slot // its owner commits there; nil: by messages
	allowed       int64 // bytes of state, of one that has more than a lowered limit: that of before; else 0

	suspension *suspension // waits, or is to: see park
	crashed    bool        // the last owner died
	refusals   []*member
	refusal    time.Time // the last one
	waits      time.Time // since when nobody has gone on with it: zero once somebody does
	since      time.Time
	moves      int
	reason     string // the last transfer was refused or came back, until another has it
	refused    int    // transfers that were

	local, remote netip.AddrPort
}

// address identifies the socket in the log: by the peer's address for a connection, else by its own.
func (s *session) address() slog.Attr {
	if s.kind == wire.Stream {
		return slog.Any("remote", s.remote)
	}
	return slog.Any("local", s.local)
}

// ends is what a log says of the socket when the keeper lets go of it for good.
func (s *session) ends() string {
	if s.kind == wire.Stream {
		return "session is reset"
	}
	return "socket is closed"
}

// request does what a member asks for; fds are those it did not take.
func (k *Keeper) request(m *member, msg *wire.Message, fds []int) (answer *wire.Message, left []int, err error) {
	if k.closed {
		return nil, fds, wire.Errorf(wire.NoSession, "the keeper is ending")
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
		err = wire.Errorf(wire.Malformed, "there is no request of type %#x", uint8(msg.Type))
	}
	return answer, fds, err
}

// session is the one that a message is about, if it is the member's.
func (m *member) session(msg *wire.Message) (*session, error) {
	s := m.sessions[msg.Session]
	if s == nil {
		return nil, wire.Errorf(wire.NoSession, "session %d is not kept for this member", msg.Session)
	}
	return s, nil
}

// keep takes a socket into keeping.
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
			return fds, wire.Errorf(wire.Owned, "session %d is member %s's", s.id, s.member)
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

// commit notes how far a session has come.
func (k *Keeper) commit(m *member, msg *wire.Message) error {
	s, err := m.session(msg)
	if err != nil {
		return err
	}
	m.service.counts.Commits++
	return k.update(m, s, msg)
}

// update takes positions and state of a message. All of it counts, or nothing.
func (k *Keeper) update(m *member, s *session, msg *wire.Message) error {
	// What was read in a slot may be of a later commit than a message that is still on its way.
	if err := s.advances(msg); err != nil {
		return err
	}
	size := int64(len(msg.State) + len(msg.Unread))
	if msg.Flags&wire.KeepState != 0 {
		if s.slot != nil {
			return wire.Errorf(wire.Malformed, "session %d commits in a slot of the board: a message says all of the state", s.id)
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

// position is how far a session has come, as in a message.
type position struct{ read, written uint64 }

// advances says what is wrong with positions that lie before those that were said.
func (s *session) advances(msg *wire.Message) error {
	said := s.said
	if wire.Before(msg.Read, said.read) || wire.Before(msg.Written, said.written) {
		return wire.Errorf(wire.Malformed, "session %d goes back: from read %d, written %d to %d, %d", s.id, said.read, said.written, msg.Read, msg.Written)
	}
	return nil
}

// stand has a session stand where a message says.
func (k *Keeper) stand(s *session, msg *wire.Message, in *slot) {
	was := s.weight()
	s.slot = in
	if msg.Flags&wire.KeepState == 0 {
		s.state = refill(s.state, msg.State)
	}
	s.read, s.written, s.unread = msg.Read, msg.Written, refill(s.unread, msg.Unread)
	k.charge(s, s.weight()-was, 0)
}

// refill copies b into the memory of old, unless that is far too large for it.
func refill(old, b []byte) []byte {
	if cap(old) > 4*len(b)+256 {
		old = nil
	}
	return append(old[:0], b...)
}

// size is that of a session's state, in bytes.
func (s *session) size() int64 { return int64(len(s.state) + len(s.unread)) }

// weight is what it counts for.
func (s *session) weight() int64 {
	if s.slot != nil {
		return s.slot.reserved
	}
	return s.size()
}

// transfer makes a session another member's. It is decided here and now: there never
// are two owners, and never none.
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

// transferSuspended takes a session from its owner for it to wait, see park.
func (k *Keeper) transferSuspended(m *member, s *session, msg *wire.Message) error {
	err := movable(s, msg.Read)
	if err == nil {
		err = k.update(m, s, msg)
	}
	if err != nil {
		s.stays(err.Error())
		k.unpark(s, wire.Errorf(wire.Lost, "session %d stays where it is: %v", s.id, err))
		return err
	}
	s.from, s.crashed, s.refusals, s.reason = m, false, nil, ""
	k.confirmSuspended(s)
	return nil
}

// stays notes why a session could not become another member's.
func (s *session) stays(why string) {
	s.service.counts.Rejected++
	s.refused++
	s.reason = why
}

// movable says why a session is better left where it is: where it stands cannot be
// told any more once both ends have closed, and only its owner knows what is unread.
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

// peer finds whom a transfer is for: the youngest of that name, for "" whoever has
// the fewest sessions here: another server's is for those who say its name.
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
		return nil, wire.Errorf(wire.Slow, "member %s (process %d) of %s does not answer for what it was given", slow.name, slow.process.PID, m.service.name)
	case strange:
		return nil, wire.Errorf(wire.NoPeer, "member %s of %s is another user's: root alone sends it sessions of user %d", name, m.service.name, m.process.UID)
	case name == "":
		return nil, wire.Errorf(wire.NoPeer, "no other member of %s is ready", m.service.name)
	}
	return nil, wire.Errorf(wire.NoPeer, "no member %s of %s is ready besides", name, m.service.name)
}

// slow says whether a member leaves unanswered what it was given, or does not read.
func (m *member) slow(now time.Time) bool {
	if m.looked != now { // once for all sessions that somebody is sought for: each may be given to it
		m.looked, m.late = now, m.owesSince(now.Add(-slowTime))
	}
	return m.hangs || m.late || len(m.queue) >= maxQueue/2
}

// owesSince says whether a member has not answered for something that it was given before then.
func (m *member) owesSince(then time.Time) bool {
	for _, since := range m.given {
		if since.Before(then) {
			return true
		}
	}
	return false
}

// giveTo makes a session a member's, and sends it.
func (k *Keeper) giveTo(m *member, s *session, msg wire.Message) {
	k.assign(s, m)
	m.given[s.id] = time.Now()
	msg.Type, msg.Session, msg.Read, msg.Written, msg.Number, msg.Text = wire.Give, s.id, s.read, s.written, uint32(s.kind), s.label
	if s.crashed {
		msg.Flags |= wire.Crashed
	}
	k.post(m, outgoing{message: msg, gives: s})
}

// assign makes m the owner; nil: it waits for one.
func (k *Keeper) assign(s *session, m *member) {
	k.disown(s)
	s.owner = m
	if m == nil {
		if s.waits.IsZero() { // else it comes from a member that has refused it
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
	_ = k.catchUp(s) // orphan has seen to it that this can be
	k.slotless(s)
	delete(m.sessions, s.id)
	delete(m.given, s.id)
	if m.gone && len(m.sessions) == 0 {
		m.released()
	}
}

// remove ends the keeping of a session; with reset, the session itself.
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
	case s.kind == wire.Packet || listens(s.fd): // neither lingers, and the address is free when this is answered
		unix.Close(s.fd)
	default:
		wire.CloseKept(s.party(), s.fd, reset && s.kind == wire.Stream)
	}
}

// ends are the addresses of a socket.
type ends [2]netip.AddrPort

// socketEnds asks for the addresses of a socket that a process passes. The process can hold the socket's lock, so this is not
// done under the keeper's.
func socketEnds(p *process, fd int) (ends, error) {
	e, err := bounded.Do(party(p.UID, "process", uint64(p.PID)), func() (e ends, err error) {
		e[0], e[1] = sock.Addresses(fd)
		return e, nil
	}, nil)
	if err != nil {
		err = wire.Errorf(wire.BadSocket, "its addresses cannot be asked for: %v", err)
	}
	return e, err
}

// positions asks how far the session's socket has come, and gives up where the owner holds the socket's lock.
func (s *session) positions() (sock.Positions, error) {
	return bounded.Do(s.party(), func() (sock.Positions, error) { return sock.ReadPositions(s.fd) }, nil)
}

// party is who can have calls about the session's socket wait.
func (s *session) party() string { return party(s.user, "session", s.id) }

// party is a user. Root's processes and sessions are each for themselves: they may be other users' in all but name.
func party(uid uint32, what string, id uint64) string {
	if uid == 0 {
		return fmt.Sprintf("%s %d", what, id)
	}
	return bounded.User(uid)
}

// listens says whether a socket still is a listener: its owner can make it a connection.
func listens(fd int) bool {
	n, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
	return err == nil && n != 0
}
