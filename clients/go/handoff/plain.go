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

// Accept serves programs without Commit, net/http for example. It returns a new connection as a
// *net.TCPConn that ends with this process. The keeper does not keep it, and no other process ever
// reads its bytes. The listener, its queue and still unread connections move to the next process.
// Sessions of other members have a state or began earlier, so they need AcceptSession. After the
// first Accept they are rejected.
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

// errBegun reports a session that cannot become a plain connection.
var errBegun = errors.New("the session began in another process, and this one accepts only plain connections: use AcceptSession")

// begun reports whether another process may have read from the session or written to it. s.mu is
// held.
func (s *Session) begun() bool {
	return s.received && (s.consumed != 0 || s.written != 0 || s.replay != 0 || len(s.unread)+len(s.committed.state) > 0)
}

// release turns a session into a plain connection. The member and the keeper forget it.
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
		s.Close() // the peer gets a FIN: there is no other way to tell it
		return nil, errors.Join(err, net.ErrClosed)
	}
	s.forget()
	if f, ok := s.conn.(*os.File); ok {
		f.Close()
	}
	return c, c.SetDeadline(time.Time{})
}

// forget ends a session without notice to its peer. It is called with s.mu held and releases it.
func (s *Session) forget() {
	s.phase = closed
	s.unfenced.Broadcast()
	s.mu.Unlock()
	s.m.mu.Lock()
	if s.m.sessions[s.id] == s {
		delete(s.m.sessions, s.id)
	}
	s.m.mu.Unlock()
	_ = s.m.post(&wire.Message{Type: wire.Drop, Session: s.id}) // an absent keeper has nothing to forget
	s.giveSlot()
}

// turnAway gives a session that cannot continue here to another member, or resets it.
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
