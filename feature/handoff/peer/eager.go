// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"net"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// eager is a TCP connection with a deadline only for blocking writes, which are rare. Each deadline
// is a Go timer, and each message would need two. A timer due before all others wakes a thread, on
// the CPU needed by the message's receiver.
type eager struct {
	*net.TCPConn
	raw syscall.RawConn
	by  atomic.Pointer[time.Time] // deadline of a blocking write; nil: none
}

func newEager(t *net.TCPConn) (*eager, error) {
	raw, err := t.SyscallConn()
	if err != nil {
		return nil, err
	}
	return &eager{TCPConn: t, raw: raw}, nil
}

// Write implements net.Conn.
func (e *eager) Write(b []byte) (n int, err error) {
	cerr := e.raw.Write(func(fd uintptr) bool {
		for {
			n, err = unix.SendmsgN(int(fd), b, nil, nil, unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT)
			if err != unix.EINTR {
				return true
			}
		}
	})
	n = max(n, 0)
	if cerr != nil {
		return n, cerr
	}
	if err == nil && n == len(b) {
		return n, nil
	}
	if err != nil && err != unix.EAGAIN {
		return n, err
	}
	if by := e.by.Load(); by != nil {
		if err := e.SetWriteDeadline(*by); err != nil {
			return n, err
		}
		defer e.SetWriteDeadline(time.Time{})
	}
	more, err := e.TCPConn.Write(b[n:])
	return n + more, err
}

// giveUp sets the deadline of a blocking write. The zero time means none.
func (c *Conn) giveUp(by time.Time) {
	e, ok := c.tls.NetConn().(*eager)
	switch {
	case !ok:
		_ = c.tls.SetWriteDeadline(by)
	case by.IsZero():
		e.by.Store(nil)
	default:
		e.by.Store(&by)
	}
}

// tcp returns the socket below TLS, nil for another kind of connection.
func (c *Conn) tcp() *net.TCPConn {
	switch t := c.tls.NetConn().(type) {
	case *eager:
		return t.TCPConn
	case *net.TCPConn:
		return t
	}
	return nil
}
