// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/sock"
	"github.com/weir-project/weir/feature/handoff/wire"
)

// phase is where a session stands in its life here.
type phase int

const (
	live   phase = iota
	fenced       // being transferred: nothing touches the socket
	gone         // another member's
	closed
)

// Session is a TCP connection that can be moved at any instant. It is a net.Conn whose
// Read takes nothing: see Commit. It is safe for concurrent use.
type Session struct {
	m     *Member
	conn  socket
	raw   syscall.RawConn
	id    uint64
	label string

	local, remote net.Addr

	writing sync.Mutex // has one Write be in one piece

	mu       sync.Mutex // held whenever the socket is touched
	unfenced sync.Cond  // phase is fenced no more
	phase    phase
	consumed uint64 // position up to which bytes were taken out of the kernel's queue
	unread   []byte // the last of them, which the committed state does not account for
	shown    int    // how many of unread Read has shown
	seen     int    // how many bytes of the kernel's queue Read has shown; unread is shown before
	written  uint64 // position that Write has come to
	replay   uint64 // bytes to come that the kernel has taken already, from a predecessor
	keptOn   *wire.Conn
	retry    time.Time  // not before, where the keeper has refused
	slot     *wire.Slot // on the member's board
	slotOn   *wire.Conn // which has said that commits are in the slot
	slotless *wire.Conn // which does not want them there

	committed struct { // with consumed and unread
		written uint64
		state   []byte
	}
	received bool
	ended    bool      // the connection was closed before it came here
	since    time.Time // it is here
	crashed  bool
	scratch  []byte

	readBy, writeBy time.Time // deadlines as the application set them
}

// socket is a socket in the runtime's poller: a *net.TCPConn of ours, a *os.File of
// somebody else's. To make that a TCPConn would set options, which the session shares
// with whoever had it: keepalive, no delay.
type socket interface {
	Close() error
	SetDeadline(time.Time) error
	SetReadDeadline(time.Time) error
	SetWriteDeadline(time.Time) error
	SyscallConn() (syscall.RawConn, error)
}

func (m *Member) newSession(c socket, label string) (*Session, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	s := &Session{m: m, conn: c, raw: raw, label: label, since: time.Now()}
	s.unfenced.L = &s.mu
	var p sock.Positions
	err = s.control(func(fd int) (err error) {
		sock.Inline(fd)
		sock.ResetPeek(fd)
		local, remote := sock.Addresses(fd)
		s.local, s.remote = net.TCPAddrFromAddrPort(local), net.TCPAddrFromAddrPort(remote)
		if s.id, err = sock.Cookie(fd); err == nil {
			p, err = sock.ReadPositions(fd)
		}
		return err
	})
	if err != nil && !errors.Is(err, sock.ErrClosed) {
		return nil, err
	}
	s.ended = err != nil
	s.consumed, s.written, s.committed.written = p.Read, p.Written, p.Written
	return s, nil
}

// control calls f with the descriptor.
func (s *Session) control(f func(fd int) error) error {
	var err error
	if cerr := s.raw.Control(func(fd uintptr) { err = f(int(fd)) }); cerr != nil {
		return cerr
	}
	return err
}

// State is what was committed last, by this process or the one that had the session
// before. Nil for a new session. It is not to be changed.
func (s *Session) State() []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.committed.state
}

// Received says whether another process had the session before.
func (s *Session) Received() bool { return s.received }

// Crashed says whether the process that had the session before has died with it.
func (s *Session) Crashed() bool { return s.crashed }

// ID is the session's number, the socket's cookie: that of weir handoff status.
func (s *Session) ID() uint64 { return s.id }

// Positions are the bytes that were read and written in the whole life of the
// connection, by whomever.
func (s *Session) Positions() (read, written uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.consumed - uint64(len(s.unread)-s.shown) + uint64(s.seen), s.written
}

// Kept says whether a keeper has the session as it was committed last.
func (s *Session) Kept() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.keptOn != nil && s.keptOn == s.m.conn.Load()
}

// Commit has the keeper note that state accounts for everything that was read and
// written so far. After a crash the next owner begins here. The state must be enough
// to go on: to write again, byte for byte, what is written from here on, or to know
// it. It is copied. Where no keeper answers, the session goes on all the same: see
// Kept.
func (s *Session) Commit(state []byte) error { return s.commit(0, state) }

// CommitExcept is Commit for a state that does not account for the last unparsed bytes
// that were read, such as a part of a message. Read goes on behind them here; the
// next owner reads them again.
func (s *Session) CommitExcept(unparsed int, state []byte) error { return s.commit(unparsed, state) }

func (s *Session) commit(unparsed int, state []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.usable(); err != nil {
		return err
	}
	if err := s.check(unparsed, state); err != nil {
		return err
	}
	return s.control(func(fd int) error {
		unread, err := s.tail(fd, unparsed)
		if err != nil {
			return err
		}
		unread = append(unread, s.unread[s.shown:]...)
		return s.note(fd, unread, unparsed, s.written, state)
	})
}

// check says what is wrong with a commit.
func (s *Session) check(unparsed int, state []byte) error {
	if n := s.shown + s.seen; unparsed < 0 || unparsed > n {
		return fmt.Errorf("%d bytes are said to be unparsed, of %d that were read after the last commit", unparsed, n)
	}
	size, limit := uint64(len(state)+unparsed+len(s.unread)-s.shown), s.m.maxState.Load()
	if size <= limit {
		return nil
	}
	if c := s.m.conn.Load(); c != nil && s.keptOn == c && size <= uint64(len(s.committed.state)+len(s.unread)) {
		return nil // the limit was larger, and the keeper has as much
	}
	return fmt.Errorf("%w: a state of %d bytes and %d unparsed ones; this keeper keeps at most %d", ErrLimit, len(state), unparsed, limit)
}

// note commits, here and at the keeper, and takes out of the queue what was seen there:
// after that only the keeper and we know it, so the keeper comes first.
func (s *Session) note(fd int, unread []byte, shown int, written uint64, state []byte) error {
	same := bytes.Equal(state, s.committed.state) && (state == nil) == (s.committed.state == nil)
	if !same {
		s.committed.state = bytes.Clone(state)
	}
	take := s.seen
	s.consumed += uint64(take)
	s.unread, s.shown, s.seen, s.committed.written = unread, shown, 0, written
	if c := s.m.conn.Load(); c != nil && s.keptOn == c {
		if s.tell(c, same) != nil {
			s.keptOn, s.retry = nil, time.Now() // the keeper does not have it as it is now
		}
	} else if c != nil && time.Now().After(s.retry) {
		s.keep(c, fd)
	}
	return sock.Discard(fd, uint64(take))
}

// tell has the keeper know what is committed: in the session's slot, where it has one and that has room; else by a message, which
// counts until the keeper is told of the slot again.
func (s *Session) tell(c *wire.Conn, same bool) error {
	if s.slotted() && s.slot.Commit(&wire.Message{Session: s.id, Read: s.consumed, Written: s.committed.written, State: s.committed.state, Unread: s.unread}) {
		if s.slotOn == c {
			return nil
		}
		s.slotOn = c
		return s.m.sendOn(c, &wire.Message{Type: wire.Commits, Session: s.id, Number: s.slot.Index, Read: s.slot.Commits()})
	}
	msg := wire.Message{Type: wire.Commit, Session: s.id}
	if same && s.slot == nil { // else the keeper may have it by the slot alone
		msg.Flags = wire.KeepState
	}
	s.slotOn = nil
	return s.send(c, &msg)
}

// slotted says whether the session has a slot, and takes one if there is none yet.
func (s *Session) slotted() bool {
	if s.slotless == s.keptOn || !s.m.boards.Load() || len(s.committed.state)+len(s.unread) > wire.SlotRoom {
		return false
	}
	if s.slot == nil {
		s.slot = s.m.board.Allocate()
	}
	return s.slot != nil
}

// send sends a message with what is committed; with KeepState the keeper has the state.
func (s *Session) send(c *wire.Conn, msg *wire.Message, fds ...int) error {
	msg.Read, msg.Written, msg.Unread = s.consumed, s.committed.written, s.unread
	if msg.Flags&wire.KeepState == 0 || len(s.committed.state)+len(s.unread) > wire.MaxInline {
		msg.Flags &^= wire.KeepState
		msg.State = s.committed.state
	}
	large, err := msg.Spill()
	if err != nil {
		return err
	}
	if large >= 0 {
		defer unix.Close(large)
		fds = append(fds, large)
	}
	return s.m.sendOn(c, msg, fds...)
}

// keep gives the keeper the session as it was committed last, with mu held.
func (s *Session) keep(c *wire.Conn, fd int) {
	s.keptOn, s.slotOn = nil, nil
	if s.send(c, &wire.Message{Type: wire.Keep, Session: s.id, Number: uint32(wire.Stream), Text: s.label}, fd) == nil {
		s.keptOn = c
	}
}

// keepAgain is keep for a keeper that has come back.
func (s *Session) keepAgain() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.m.conn.Load(); c != nil && s.phase == live {
		s.control(func(fd int) error { s.keep(c, fd); return nil })
	}
}

// notKept notes that the keeper has refused the session.
func (s *Session) notKept() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.keptOn, s.retry = nil, time.Now().Add(time.Second)
	if s.slotOn != nil {
		s.slotless = s.slotOn // as it would refuse it again
	}
}
