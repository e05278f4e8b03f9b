// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"errors"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/wire"
)

// Accept is for servers that know of no Commit: net/http, say. It returns a new connection as a *net.TCPConn, which ends with this
// process: the keeper does not keep it, and no other process ever reads its bytes again. The listener, its queue, and
// connections that nobody has read from yet still go to the next process. Sessions of other members, which come with a state or
// in the middle of their stream, are for AcceptSession: after the first Accept they are refused.
func (l *Listener) Accept() (net.Conn, error) {
	l.plain.Store(true)
	for {
		s, err := l.AcceptSession()
		if err != nil {
			return nil, err
		}
		c, err := s.release()
		switch {
		case err == nil:
			return c, nil
		case errors.Is(err, errBegun):
			l.m.turnAway(s)
		}
	}
}

// errBegun says that a session cannot be a plain connection.
var errBegun = errors.New("the session has begun in another process, and this one accepts plain connections (Accept): AcceptSession is for sessions")

// begun says whether another process may have read from the session or written to it. s.mu is held.
func (s *Session) begun() bool {
	return s.received && (s.consumed != 0 || s.written != 0 || s.replay != 0 || len(s.unread)+len(s.committed.state) > 0)
}

// release makes a plain connection of a session: the member and the keeper forget it.
func (s *Session) release() (net.Conn, error) {
	s.mu.Lock()
	if err := s.usable(); err != nil {
		s.mu.Unlock()
		return nil, err
	}
	if s.begun() {
		s.mu.Unlock()
		return nil, errBegun
	}
	c, err := net.Conn(nil), error(nil)
	switch own := s.conn.(type) {
	case *net.TCPConn:
		c = own
	case *os.File:
		c, err = net.FileConn(own)
	}
	if c == nil || err != nil {
		s.mu.Unlock()
		s.Close() // which the peer sees: there is no other way to tell
		return nil, errors.Join(err, net.ErrClosed)
	}
	s.forget()
	if f, ok := s.conn.(*os.File); ok {
		f.Close()
	}
	return c, c.SetDeadline(time.Time{})
}

// forget ends a session without a word to its peer. s.mu is held, and is not on return.
func (s *Session) forget() {
	s.phase = closed
	s.unfenced.Broadcast()
	s.mu.Unlock()
	s.m.mu.Lock()
	if s.m.sessions[s.id] == s {
		delete(s.m.sessions, s.id)
	}
	s.m.mu.Unlock()
	_ = s.m.post(&wire.Message{Type: wire.Drop, Session: s.id}) // a keeper that is not there has nothing to forget
	s.giveSlot()
}

// turnAway gives a session that cannot go on here to another member, or resets it.
func (m *Member) turnAway(s *Session) {
	err := m.TransferCommitted(s, "")
	if err == nil || errors.Is(err, ErrMoved) || errors.Is(err, ErrUncertain) {
		return
	}
	m.o.Log.Warn("session reset", "session", s.id, "remote", s.remote, "err", errors.Join(errBegun, err))
	s.mu.Lock()
	if s.usable() != nil {
		s.mu.Unlock()
		return
	}
	_ = s.control(func(fd int) error {
		return unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	})
	s.forget()
	s.conn.Close()
}
