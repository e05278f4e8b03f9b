// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/sock"
)

// usable waits during a transfer and returns an error for an ended session. s.mu is held.
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

// Read returns the next bytes. They stay kept until Commit accounts for them. It returns [ErrMoved]
// when another member has the session, and [ErrUncommitted] when Options.Window bytes are
// uncommitted.
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
			n, err = s.showNext(int(fd), p)
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

// again reports whether an operation failed only because of a transfer that did not succeed. The
// caller then repeats it.
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

// explain turns errors into *net.OpError values, as net.TCPConn does.
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
		err = o.Err // of the raw connection, with another operation name
	}
	return &net.OpError{Op: op, Net: "tcp", Source: s.LocalAddr(), Addr: s.RemoteAddr(), Err: err}
}

// showNext returns the next bytes: 0 and no error if there are none yet.
func (s *Session) showNext(fd int, p []byte) (int, error) {
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
		queued, err := sock.Queued(fd)
		if err != nil {
			return 0, err
		}
		if queued > s.seen {
			// The peek stopped at an urgent mark. It continues when the mark is at the beginning of
			// the queue.
			if err := s.setAside(fd); err != nil {
				return 0, err
			}
			continue
		}
		// Nothing new. The queue shows the end only when it is empty.
		if e := events(fd); e != 0 {
			if code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR); e&unix.POLLERR != 0 && err == nil && code != 0 {
				return 0, syscall.Errno(code)
			}
			ended = true // unless the last bytes arrived just before the end
			continue
		}
		// A few bytes left in the queue can occupy a whole segment's memory (64 KiB on loopback).
		// The peer would then wait for a window that never opens. So the keeper gets them, too,
		// during the wait for the rest.
		return 0, s.setAside(fd)
	}
}

// setAside takes the bytes already returned out of the queue, for a state not covering them.
func (s *Session) setAside(fd int) error {
	tail, err := s.tail(fd, s.shown+s.seen)
	if err != nil {
		return err
	}
	return s.note(fd, tail, len(tail), s.committed.written, s.committed.state)
}

// tail returns a copy of the last n bytes returned by Read.
func (s *Session) tail(fd, n int) ([]byte, error) {
	out := make([]byte, 0, n)
	if old := n - s.seen; old > 0 {
		out = append(out, s.unread[s.shown-old:s.shown]...)
	}
	if n == 0 || s.seen == 0 {
		return out, nil
	}
	all := make([]byte, s.seen) // in one piece: an urgent mark is at its beginning or behind it
	if got, err := s.peek(fd, 0, all); err != nil || got != s.seen {
		return nil, fmt.Errorf("%d read bytes are not in the queue, only %d: %w", s.seen, got, err)
	}
	return append(out, all[max(0, s.seen-n):]...), nil
}

// peek fills p with the queue's bytes after the first skip bytes. It returns the number of bytes
// including those.
func (s *Session) peek(fd, skip int, p []byte) (int, error) {
	if skip == 0 {
		return sock.Peek(fd, p)
	}
	if len(s.scratch) < skip {
		s.scratch = make([]byte, max(skip, 4096))
	}
	return sock.Peek(fd, s.scratch[:skip], p)
}

// events returns the events ending a stream.
func events(fd int) int16 {
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
	unix.Poll(p, 0)
	return p[0].Revents
}

// Write writes to the peer. After a predecessor's crash, the caller writes the bytes after its last
// commit again. Write skips the sent bytes.
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
