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

// past is a deadline that wakes all waiters.
var past = time.Unix(1, 0)

// fence stops all use of the socket until unfence or moved.
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

// ours reports whether the session has neither moved nor closed.
func (s *Session) ours() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.phase == live || s.phase == fenced
}

// moved releases a session owned by another member now.
func (s *Session) moved() {
	if s.end(gone) {
		s.giveSlot() // the keeper has released it
	}
}

// relinquish releases a session for others. The keeper still reads the commits in its slot. The
// caller calls giveSlot after the keeper knows.
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
	s.conn.Close() // our duplicate; the connection lives on with the other owner
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
	known := s.keptOn == c || s.slot != nil // by a keeper, possibly after a rejection
	// Bytes in the queue at close cause a reset. Read bytes must not.
	s.control(func(fd int) error { return sock.Discard(fd, uint64(s.seen)) })
	s.shutdown() // the peer gets the FIN now, before the keeper also closes its duplicate
	s.mu.Unlock()
	if !s.end(closed) {
		return nil
	}
	if c != nil && known {
		s.m.sendOn(c, &wire.Message{Type: wire.Drop, Session: s.id})
	}
	// Not earlier: after a death of this process, the keeper would read another session's commits in
	// the slot and consider this session lost.
	s.giveSlot()
	return nil
}

// giveSlot frees the slot of an ended session for another one.
func (s *Session) giveSlot() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.slot != nil {
		s.slot.Give()
		s.slot = nil
	}
}

// CloseWrite ends the outgoing stream (FIN).
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

// LocalAddr returns the local address of the connection.
func (s *Session) LocalAddr() net.Addr { return s.local }

// RemoteAddr returns the peer's address.
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
		return nil // set when the transfer fails
	}
	return set(t)
}

// SyscallConn returns the socket itself. Use it only for socket options (keepalive, no delay). They
// move with the session.
func (s *Session) SyscallConn() (syscall.RawConn, error) { return s.raw, nil }

// transfer gives a session to another member, with a new state or as of the last commit.
func (m *Member) transfer(s *Session, to string, unparsed int, state []byte, asCommitted bool) error {
	if err := s.fence(); err != nil {
		return err
	}
	msg, err := s.giveAway(to, unparsed, state, asCommitted)
	if err == nil {
		s.unlock() // the next owner locks it
		err = m.callWithState(msg, s)
	}
	switch {
	case err == nil:
		return nil // the receiving goroutine has released it
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

// giveAway returns the transfer message.
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
		// The seen bytes are still in the queue. The next owner takes them out.
		msg.Read, msg.Written, msg.State = s.consumed+uint64(s.seen), s.written, state
		msg.Unread = append(unread, s.unread[s.shown:]...)
		return err
	})
	return msg, err
}

// resolve finds the owner of a session after the keeper exited during its transfer. A new owner has
// locked it and tells the next keeper at once. Clients in other languages do not lock. resolve
// gives them time after the next keeper starts.
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

// lock locks the session and reports whether this process owns it: see sock.Lock.
func (s *Session) lock() (ours bool) {
	ours = true
	_ = s.control(func(fd int) error { ours = sock.Lock(fd); return nil })
	return ours
}

func (s *Session) unlock() {
	_ = s.control(func(fd int) error { sock.Unlock(fd); return nil })
}

// given handles a socket offered by the keeper.
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
			err = wire.Errorf(wire.NotFound, "no packet socket for %q here", msg.Text)
		}
	}
	wire.CloseAll(fds)
	if err == nil {
		m.post(&wire.Message{Type: wire.Accept, Session: msg.Session})
		return
	}
	m.o.Log.Warn("offered socket rejected", "session", msg.Session, "err", err)
	m.post(&wire.Message{Type: wire.Reject, Session: msg.Session, Number: uint32(wire.Lost), Text: err.Error()})
}

// adoptSession creates a session from an offered socket, at its current position.
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
	if !s.lock() { // the keeper exited meanwhile, and the previous owner took it back
		c.Close()
		return errors.New("another process owns it")
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

// begin moves a session to the position of its state. It takes out bytes read and committed by the
// predecessor but still queued.
func (s *Session) begin(msg *wire.Message) error {
	at, put := s.consumed, s.written // as in the kernel
	if s.ended {
		at, put = msg.Read, msg.Written // nothing is queued, and Read will report the end
	}
	if wire.Before(msg.Read, at) || wire.Before(put, msg.Written) {
		return fmt.Errorf("%w: the socket is at read %d, written %d, its state at %d and %d", wire.ErrLost, at, put, msg.Read, msg.Written)
	}
	if err := s.control(func(fd int) error { return sock.Discard(fd, msg.Read-at) }); err != nil {
		return err
	}
	s.consumed, s.written, s.replay, s.committed.written = msg.Read, msg.Written, put-msg.Written, msg.Written
	s.committed.state, s.unread = bytes.Clone(msg.State), bytes.Clone(msg.Unread)
	s.received, s.crashed = true, msg.Flags&wire.Crashed != 0
	return nil
}
