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

// phase is the state of a session in this process.
type phase int

const (
	live   phase = iota
	fenced       // being transferred: nobody uses the socket
	gone         // owned by another member
	closed
)

// Session is a TCP connection movable at any time. It is a net.Conn, but its Read leaves the bytes
// in the socket until a commit: see Commit. It is safe for concurrent use.
type Session struct {
	m     *Member
	conn  socket
	raw   syscall.RawConn
	id    uint64
	label string

	local, remote net.Addr

	writing sync.Mutex // keeps each Write contiguous

	mu       sync.Mutex // held during any use of the socket
	unfenced sync.Cond  // signalled when phase is no longer fenced
	phase    phase
	consumed uint64 // position of the first byte left in the kernel's queue
	unread   []byte // the last consumed bytes, not covered by the committed state
	shown    int    // bytes of unread already returned by Read
	seen     int    // bytes of the kernel's queue already returned by Read; unread comes first
	written  uint64 // position of Write
	replay   uint64 // bytes to be written again that the predecessor has already sent
	keptOn   *wire.Conn
	retry    time.Time  // earliest retry after a rejection by the keeper
	slot     *wire.Slot // on the member's board
	slotOn   *wire.Conn // the keeper connection told to read commits from the slot
	slotless *wire.Conn // the keeper connection that rejected the slot

	committed struct { // together with consumed and unread
		written uint64
		state   []byte
	}
	received bool
	ended    bool      // the connection was closed before it arrived here
	since    time.Time // of its arrival
	crashed  bool
	scratch  []byte

	readBy, writeBy time.Time // deadlines set by the application
}

// socket is a socket in the runtime's poller: our own *net.TCPConn, or the *os.File of a received
// socket. Making a TCPConn of the latter would change its options (keepalive, no delay), and the
// session shares them with its previous owner.
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

// State returns the latest committed state, of this process or the previous owner. It is nil for a
// new session. Do not modify it.
func (s *Session) State() []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.committed.state
}

// Received reports whether another process owned the session before.
func (s *Session) Received() bool { return s.received }

// Crashed reports whether the previous owner died with the session.
func (s *Session) Crashed() bool { return s.crashed }

// ID returns the session's number, the socket's cookie. weir handoff status prints the same number.
func (s *Session) ID() uint64 { return s.id }

// Positions returns the number of bytes read and written over the whole life of the connection, by
// all its owners.
func (s *Session) Positions() (read, written uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.consumed - uint64(len(s.unread)-s.shown) + uint64(s.seen), s.written
}

// Kept reports whether a keeper has the session as of the last commit.
func (s *Session) Kept() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.keptOn != nil && s.keptOn == s.m.conn.Load()
}

// Commit stores state at the keeper. The state must account for everything read and written so far,
// because the next owner begins here after a crash. It must suffice to continue: the next owner
// must be able to write the same bytes again, or know them. Commit copies the state. Without a
// keeper the session continues unkept: see Kept.
func (s *Session) Commit(state []byte) error { return s.commit(0, state) }

// CommitExcept is Commit for a state without the last unparsed bytes read, a part of a message for
// example. Here Read continues behind them. The next owner reads them again.
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

// check returns an error for an invalid commit.
func (s *Session) check(unparsed int, state []byte) error {
	if n := s.shown + s.seen; unparsed < 0 || unparsed > n {
		return fmt.Errorf("%d unparsed bytes, but only %d read after the last commit", unparsed, n)
	}
	size, limit := uint64(len(state)+unparsed+len(s.unread)-s.shown), s.m.maxState.Load()
	if size <= limit {
		return nil
	}
	if c := s.m.conn.Load(); c != nil && s.keptOn == c && size <= uint64(len(s.committed.state)+len(s.unread)) {
		return nil // the limit was larger before, and the keeper already has as much
	}
	return fmt.Errorf("%w: a state of %d bytes and %d unparsed ones; this keeper keeps at most %d", ErrLimit, len(state), unparsed, limit)
}

// note commits, here and at the keeper, and then takes the seen bytes out of the queue. The keeper
// comes first, because afterwards only the keeper and this process have them.
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
			s.keptOn, s.retry = nil, time.Now() // the keeper's copy is outdated
		}
	} else if c != nil && time.Now().After(s.retry) {
		s.keep(c, fd)
	}
	return sock.Discard(fd, uint64(take))
}

// tell sends the commit to the keeper. It uses the session's slot if there is one with enough room.
// Otherwise it sends a message, which counts until the keeper is told of the slot again.
func (s *Session) tell(c *wire.Conn, same bool) error {
	if s.slotted() && s.slot.Commit(&wire.Message{Session: s.id, Read: s.consumed, Written: s.committed.written, State: s.committed.state, Unread: s.unread}) {
		if s.slotOn == c {
			return nil
		}
		s.slotOn = c
		return s.m.sendOn(c, &wire.Message{Type: wire.Commits, Session: s.id, Number: s.slot.Index, Read: s.slot.Commits()})
	}
	msg := wire.Message{Type: wire.Commit, Session: s.id}
	if same && s.slot == nil { // else the keeper may have the state only from the slot
		msg.Flags = wire.KeepState
	}
	s.slotOn = nil
	return s.send(c, &msg)
}

// slotted reports whether the session has a slot. It allocates one if necessary.
func (s *Session) slotted() bool {
	if s.slotless == s.keptOn || !s.m.boards.Load() || len(s.committed.state)+len(s.unread) > wire.SlotRoom {
		return false
	}
	if s.slot == nil {
		s.slot = s.m.board.Allocate()
	}
	return s.slot != nil
}

// send sends a message with the commit. With KeepState the keeper already has the state.
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

// keep gives the keeper the session as of the last commit. s.mu is held.
func (s *Session) keep(c *wire.Conn, fd int) {
	s.keptOn, s.slotOn = nil, nil
	if s.send(c, &wire.Message{Type: wire.Keep, Session: s.id, Number: uint32(wire.Stream), Text: s.label}, fd) == nil {
		s.keptOn = c
	}
}

// keepAgain calls keep after the keeper is back.
func (s *Session) keepAgain() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.m.conn.Load(); c != nil && s.phase == live {
		s.control(func(fd int) error { s.keep(c, fd); return nil })
	}
}

// notKept records the keeper's rejection of the session.
func (s *Session) notKept() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.keptOn, s.retry = nil, time.Now().Add(time.Second)
	if s.slotOn != nil {
		s.slotless = s.slotOn // it would reject the slot again
	}
}
