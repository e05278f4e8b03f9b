// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
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
	retry    time.Time // not before, where the keeper has refused

	committed struct { // with consumed and unread
		written uint64
		state   []byte
	}
	received bool
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
	s := &Session{m: m, conn: c, raw: raw, label: label}
	s.unfenced.L = &s.mu
	var p sock.Positions
	err = s.control(func(fd int) (err error) {
		local, remote := sock.Addresses(fd)
		s.local, s.remote = net.TCPAddrFromAddrPort(local), net.TCPAddrFromAddrPort(remote)
		if s.id, err = sock.Cookie(fd); err == nil {
			p, err = sock.PositionsOf(fd)
		}
		return err
	})
	if err != nil && !errors.Is(err, sock.ErrClosed) {
		return nil, err
	}
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

// usable waits while the session is being transferred, with mu held.
func (s *Session) usable() error {
	for s.phase == fenced {
		s.unfenced.Wait()
	}
	switch s.phase {
	case gone:
		return ErrMoved
	case closed:
		return net.ErrClosed
	}
	return nil
}

// Read shows the bytes that follow those it has shown before; that they are done with
// says Commit. It returns [ErrMoved] when another member has the session, and
// [ErrUncommitted] when Options.Window bytes wait to be committed.
func (s *Session) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for {
		var n int
		var err error
		werr := s.raw.Read(func(fd uintptr) bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			if s.phase != live {
				err = errFenced
				return true
			}
			n, err = s.look(int(fd), p)
			return n > 0 || err != nil
		})
		if err == nil {
			err = werr
		}
		if err == nil || !s.again(err, &s.readBy) {
			return n, s.explain("read", err)
		}
	}
}

var errFenced = errors.New("fenced")

// again says whether something failed only because the session stood still for a
// while: being transferred, which did not come to be.
func (s *Session) again(err error, by *time.Time) bool {
	if !errors.Is(err, errFenced) && !errors.Is(err, os.ErrDeadlineExceeded) && !errors.Is(err, net.ErrClosed) && !errors.Is(err, os.ErrClosed) {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.usable() != nil {
		return false
	}
	return by.IsZero() || time.Now().Before(*by)
}

// explain makes errors those of a net.Conn.
func (s *Session) explain(op string, err error) error {
	if err == nil || err == io.EOF || errors.Is(err, ErrUncommitted) {
		return err
	}
	s.mu.Lock()
	now := s.phase
	s.mu.Unlock()
	if now == gone {
		return ErrMoved
	}
	if errors.Is(err, os.ErrClosed) {
		err = net.ErrClosed
	}
	if o, ok := errors.AsType[*net.OpError](err); ok {
		err = o.Err // of the raw connection, whose name for the operation is another
	}
	return &net.OpError{Op: op, Net: "tcp", Source: s.LocalAddr(), Addr: s.RemoteAddr(), Err: err}
}

// look shows what follows what was shown: 0 and no error if there is nothing yet.
func (s *Session) look(fd int, p []byte) (int, error) {
	if s.shown < len(s.unread) {
		n := copy(p, s.unread[s.shown:])
		s.shown += n
		return n, nil
	}
	room := s.m.o.Window - s.shown - s.seen
	if room <= 0 {
		return 0, fmt.Errorf("%w: %d", ErrUncommitted, s.shown+s.seen)
	}
	p = p[:min(len(p), room)]
	for ended := false; ; {
		n, err := s.peek(fd, s.seen, p)
		switch {
		case err != nil && err != unix.EAGAIN:
			return 0, err
		case n > s.seen:
			n -= s.seen
			s.seen += n
			return n, nil
		case s.seen == 0 && err == nil, ended:
			return 0, io.EOF
		}
		if s.seen == 0 {
			return 0, nil
		}
		// Nothing new. The end shows in the queue only when that is empty.
		if e := events(fd); e != 0 {
			if code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR); e&unix.POLLERR != 0 && err == nil && code != 0 {
				return 0, syscall.Errno(code)
			}
			ended = true // unless the last bytes came just before the end
			continue
		}
		// A few bytes that stay in the queue can hold a whole segment's memory, and the peer
		// waits for a window that never opens (a segment of loopback is 64 KiB). So the keeper
		// has them, too, while we wait for the rest.
		return 0, s.setAside(fd)
	}
}

// setAside takes what was shown out of the queue, for a state that does not account
// for it.
func (s *Session) setAside(fd int) error {
	tail, err := s.tail(fd, s.shown+s.seen)
	if err != nil {
		return err
	}
	return s.note(fd, tail, len(tail), s.committed.written, s.committed.state)
}

// tail is a copy of the last n bytes that were shown.
func (s *Session) tail(fd, n int) ([]byte, error) {
	out := make([]byte, 0, n)
	if old := n - s.seen; old > 0 {
		out = append(out, s.unread[s.shown-old:s.shown]...)
	}
	if n == 0 || s.seen == 0 {
		return out, nil
	}
	all := make([]byte, s.seen)
	if got, err := s.peek(fd, 0, all); err != nil || got != s.seen {
		return nil, fmt.Errorf("%d bytes that were read are not in the queue: %d are, %w", s.seen, got, err)
	}
	return append(out, all[max(0, s.seen-n):]...), nil
}

// peek fills p with what is in the queue behind the first skip bytes, and returns how
// many bytes there are with those.
func (s *Session) peek(fd, skip int, p []byte) (int, error) {
	for {
		var n int
		var err error
		if skip == 0 {
			n, _, err = unix.Recvfrom(fd, p, unix.MSG_PEEK|unix.MSG_DONTWAIT)
		} else {
			if len(s.scratch) < skip {
				s.scratch = make([]byte, max(skip, 4096))
			}
			n, _, _, _, err = unix.RecvmsgBuffers(fd, [][]byte{s.scratch[:skip], p}, nil, unix.MSG_PEEK|unix.MSG_DONTWAIT)
		}
		if err != unix.EINTR {
			return max(n, 0), err
		}
	}
}

// events are those that end a stream.
func events(fd int) int16 {
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
	unix.Poll(p, 0)
	return p[0].Revents
}

// Write writes to the peer. After a crash of a predecessor the bytes that it wrote
// after its last commit come again: they are counted, and not sent twice.
func (s *Session) Write(p []byte) (int, error) {
	s.writing.Lock()
	defer s.writing.Unlock()
	done := 0
	for {
		var err error
		werr := s.raw.Write(func(fd uintptr) bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			for done < len(p) && err == nil {
				if s.phase != live {
					err = errFenced
					break
				}
				var n int
				if n, err = s.put(int(fd), p[done:]); err == unix.EAGAIN {
					err = nil
					return false
				}
				done += n
			}
			return true
		})
		if err == nil {
			err = werr
		}
		if err == nil || !s.again(err, &s.writeBy) {
			return done, s.explain("write", err)
		}
	}
}

func (s *Session) put(fd int, p []byte) (int, error) {
	if s.replay > 0 {
		n := min(s.replay, uint64(len(p)))
		s.replay -= n
		s.written += n
		return int(n), nil
	}
	n, err := unix.SendmsgN(fd, p, nil, nil, unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT)
	if err == unix.EINTR {
		return 0, nil
	}
	if n > 0 {
		s.written += uint64(n)
	}
	return max(n, 0), err
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
	if limit := s.m.maxState.Load(); uint64(len(state)+unparsed+len(s.unread)-s.shown) > limit {
		return fmt.Errorf("%w: a state of %d bytes and %d unparsed ones; this keeper keeps at most %d", ErrLimit, len(state), unparsed, limit)
	}
	return nil
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
		msg := wire.Message{Type: wire.Commit, Session: s.id}
		if same {
			msg.Flags = wire.KeepState
		}
		s.send(c, &msg)
	} else if c != nil && time.Now().After(s.retry) {
		s.keep(c, fd)
	}
	return sock.Discard(fd, uint64(take))
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
	s.keptOn = nil
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
}
