// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/sock"
	"github.com/weir-project/weir/feature/handoff/wire"
)

// past is a deadline that wakes whoever waits.
var past = time.Unix(1, 0)

// fence has nothing touch the socket any more, until unfence or moved.
func (s *Session) fence() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.usable(); err != nil {
		return err
	}
	s.phase = fenced
	s.conn.SetDeadline(past)
	return nil
}

func (s *Session) unfence() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.phase != fenced {
		return
	}
	s.phase = live
	s.conn.SetReadDeadline(s.readBy)
	s.conn.SetWriteDeadline(s.writeBy)
	s.unfenced.Broadcast()
}

// ours says whether the session has not moved and is not closed.
func (s *Session) ours() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.phase == live || s.phase == fenced
}

// moved lets go of a session that is another member's.
func (s *Session) moved() {
	if s.end(gone) {
		s.giveSlot() // the keeper has let go of it
	}
}

// relinquish lets go of a session for others to find it at the keeper, and what it has committed in its slot: the caller calls giveSlot
// when the keeper knows.
func (s *Session) relinquish() { s.end(gone) }

func (s *Session) end(to phase) bool {
	s.mu.Lock()
	was := s.phase
	if was == gone || was == closed {
		s.mu.Unlock()
		return false
	}
	s.phase = to
	s.unfenced.Broadcast()
	s.mu.Unlock()
	s.m.mu.Lock()
	if s.m.sessions[s.id] == s {
		delete(s.m.sessions, s.id)
	}
	s.m.mu.Unlock()
	s.conn.Close() // our duplicate; the connection is whoever else has one
	return true
}

// Close ends the session for good.
func (s *Session) Close() error {
	s.mu.Lock()
	if err := s.usable(); err != nil {
		s.mu.Unlock()
		if errors.Is(err, ErrMoved) {
			return nil
		}
		return err
	}
	c := s.m.conn.Load()
	known := s.keptOn == c || s.slot != nil // to a keeper, also where it has refused something since
	// Bytes that are in the queue when a socket closes are a reset to the peer; those that
	// were read are not meant.
	s.control(func(fd int) error { return sock.Discard(fd, uint64(s.seen)) })
	s.shutdown() // the peer hears of it now, not when the keeper has let go too
	s.mu.Unlock()
	if !s.end(closed) {
		return nil
	}
	if c != nil && known {
		s.m.sendOn(c, &wire.Message{Type: wire.Drop, Session: s.id})
	}
	s.giveSlot() // not before: another session's commits there would tell the keeper of a process killed here that this one is lost
	return nil
}

// giveSlot has another session commit in the slot of one that has ended.
func (s *Session) giveSlot() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.slot != nil {
		s.slot.Give()
		s.slot = nil
	}
}

// CloseWrite tells the peer that nothing more comes (FIN).
func (s *Session) CloseWrite() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.usable(); err != nil {
		return err
	}
	return s.shutdown()
}

func (s *Session) shutdown() error {
	return s.control(func(fd int) error { return os.NewSyscallError("shutdown", unix.Shutdown(fd, unix.SHUT_WR)) })
}

// LocalAddr is the address that the peer connected to.
func (s *Session) LocalAddr() net.Addr { return s.local }

// RemoteAddr is the peer's address.
func (s *Session) RemoteAddr() net.Addr { return s.remote }

// SetDeadline implements net.Conn.
func (s *Session) SetDeadline(t time.Time) error {
	return errors.Join(s.SetReadDeadline(t), s.SetWriteDeadline(t))
}

// SetReadDeadline implements net.Conn.
func (s *Session) SetReadDeadline(t time.Time) error {
	return s.setDeadline(&s.readBy, t, s.conn.SetReadDeadline)
}

// SetWriteDeadline implements net.Conn.
func (s *Session) SetWriteDeadline(t time.Time) error {
	return s.setDeadline(&s.writeBy, t, s.conn.SetWriteDeadline)
}

func (s *Session) setDeadline(by *time.Time, t time.Time, set func(time.Time) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	*by = t
	if s.phase == fenced {
		return nil // set when it is ours again
	}
	return set(t)
}

// SyscallConn is the socket itself, for its options (keepalive, no delay) alone: they
// go with the session.
func (s *Session) SyscallConn() (syscall.RawConn, error) { return s.raw, nil }

// transfer gives a session away: with a state, or as it was committed last.
func (m *Member) transfer(s *Session, to string, unparsed int, state []byte, asCommitted bool) error {
	if err := s.fence(); err != nil {
		return err
	}
	msg, err := s.giveAway(to, unparsed, state, asCommitted)
	if err == nil {
		s.unlock() // the next one locks it
		err = m.callWithState(msg, s)
	}
	switch {
	case err == nil:
		return nil // the reader has let go of it
	case errors.Is(err, ErrNoKeeper) && !errors.Is(err, errNotAsked):
		go m.resolve(s)
		return fmt.Errorf("%w: %w", ErrUncertain, err)
	}
	if !s.lock() {
		s.moved()
		return fmt.Errorf("%w: %w", ErrMoved, err)
	}
	s.unfence()
	return fmt.Errorf("transfer to %q: %w", to, err)
}

func (m *Member) callWithState(msg *wire.Message, s *Session, fds ...int) error {
	large, err := msg.Spill()
	if err != nil {
		return err
	}
	if large >= 0 {
		defer wire.CloseAll([]int{large})
		fds = append(fds, large)
	}
	_, err = m.call(msg, s, fds...)
	return err
}

// giveAway is the message that does it.
func (s *Session) giveAway(to string, unparsed int, state []byte, asCommitted bool) (*wire.Message, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.keptOn == nil || s.keptOn != s.m.conn.Load() {
		return nil, fmt.Errorf("%w: it does not keep this session", errNotAsked)
	}
	s.slotOn = nil // a message counts until the keeper is told of the slot again
	msg := &wire.Message{Type: wire.Transfer, Session: s.id, Name: to}
	if asCommitted {
		msg.Read, msg.Written, msg.State, msg.Unread = s.consumed, s.committed.written, s.committed.state, s.unread
		return msg, nil
	}
	if err := s.check(unparsed, state); err != nil {
		return nil, err
	}
	err := s.control(func(fd int) error {
		unread, err := s.tail(fd, unparsed)
		// What was seen is still in the queue: the other takes it out.
		msg.Read, msg.Written, msg.State = s.consumed+uint64(s.seen), s.written, state
		msg.Unread = append(unread, s.unread[s.shown:]...)
		return err
	})
	return msg, err
}

// resolve finds out whose a session is that was being transferred when the keeper went. If the other has it, it has locked it,
// and says so to the next keeper at once. One that does not lock, as clients of other languages, is given time for that from
// when the next keeper is there.
func (m *Member) resolve(s *Session) {
	for {
		c := m.conn.Load()
		wait := unsure
		if c == nil {
			wait = retryLast
		}
		select {
		case <-m.done:
			return
		case <-time.After(wait):
		}
		if c == nil || c != m.conn.Load() {
			continue
		}
		if !s.lock() {
			s.moved()
			return
		}
		err := s.control(func(fd int) error {
			return m.callWithState(&wire.Message{Type: wire.Keep, Session: s.id, Number: uint32(wire.Stream), Text: s.label,
				Read: s.consumed, Written: s.committed.written, State: s.committed.state, Unread: s.unread}, nil, fd)
		})
		switch {
		case err == nil:
			s.mu.Lock()
			s.keptOn, s.slotOn = c, nil
			s.mu.Unlock()
			s.unfence()
			return
		case errors.Is(err, wire.ErrOwned):
			s.moved()
			return
		}
	}
}

// lock says whether the session is this process's: sock.Lock.
func (s *Session) lock() (ours bool) {
	ours = true
	_ = s.control(func(fd int) error { ours = sock.Lock(fd); return nil })
	return ours
}

func (s *Session) unlock() {
	_ = s.control(func(fd int) error { sock.Unlock(fd); return nil })
}

// given takes what the keeper gives.
func (m *Member) given(msg *wire.Message, fds []int) {
	if len(fds) == 0 && !msg.Cut {
		return
	}
	var err error
	switch kind := wire.Kind(msg.Number); {
	case msg.Cut:
		err = wire.ErrNoDescriptors()
	case kind == wire.Stream:
		err = m.adoptSession(msg, fds)
	case kind == wire.Listener:
		err = m.adoptListener(msg, fds[0])
	default:
		if !m.has(msg) {
			err = wire.Errorf(wire.NotFound, "nobody reads %q here", msg.Text)
		}
	}
	wire.CloseAll(fds)
	if err == nil {
		m.post(&wire.Message{Type: wire.Accept, Session: msg.Session})
		return
	}
	m.o.Log.Warn("not taken", "session", msg.Session, "err", err)
	m.post(&wire.Message{Type: wire.Reject, Session: msg.Session, Number: uint32(wire.Lost), Text: err.Error()})
}

// adoptSession makes a session of what was given, at the position where it stands.
func (m *Member) adoptSession(msg *wire.Message, fds []int) error {
	l := m.listenerFor(msg.Text)
	if l == nil {
		return errors.New("this member does not accept sessions now")
	}
	if msg.Flags&wire.StateFD != 0 {
		if len(fds) < 2 {
			return errors.New("the state is missing")
		}
		if err := msg.Fetch(fds[1], wire.MaxState); err != nil {
			return err
		}
	}
	if err := sock.Check(fds[0], wire.Stream); err != nil {
		return err
	}
	if err := unix.SetNonblock(fds[0], true); err != nil {
		return err
	}
	c := os.NewFile(uintptr(fds[0]), "session")
	fds[0] = -1
	s, err := m.newSession(c, msg.Text)
	if err != nil {
		c.Close()
		return err
	}
	if !s.lock() { // the keeper has gone since, and whoever had the session has taken it back
		c.Close()
		return errors.New("another process has it")
	}
	err = s.begin(msg)
	if err == nil && l.plain.Load() && s.begun() {
		err = errBegun
	}
	if err != nil {
		c.Close()
		return err
	}
	s.keptOn = m.conn.Load()
	m.mu.Lock()
	m.sessions[s.id] = s
	m.mu.Unlock()
	l.deliver(s)
	return nil
}

// begin puts a session where its state stands: what the predecessor had read and
// committed, and not yet taken out, is taken out now.
func (s *Session) begin(msg *wire.Message) error {
	at, put := s.consumed, s.written // as the kernel has it
	if s.ended {
		at, put = msg.Read, msg.Written // there is nothing to take, and Read will say so
	}
	if wire.Before(msg.Read, at) || wire.Before(put, msg.Written) {
		return fmt.Errorf("%w: it stands at read %d, written %d, its state at %d and %d", wire.ErrLost, at, put, msg.Read, msg.Written)
	}
	if err := s.control(func(fd int) error { return sock.Discard(fd, msg.Read-at) }); err != nil {
		return err
	}
	s.consumed, s.written, s.replay, s.committed.written = msg.Read, msg.Written, put-msg.Written, msg.Written
	s.committed.state, s.unread = bytes.Clone(msg.State), bytes.Clone(msg.Unread)
	s.received, s.crashed = true, msg.Flags&wire.Crashed != 0
	return nil
}
