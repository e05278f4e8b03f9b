// SPDX-License-Identifier: Apache-2.0

package accept

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/bounded"
)

// The peer of a Unix socket can pass descriptors with a blocking last close: see
// [bounded.Interrupt]. The receiver of such a message closes them, and so does the close of a
// connection with such a message.

// ErrRights reports descriptors passed to a listener without use for them.
var ErrRights = errors.New("the peer passes descriptors, not accepted here")

// soPassRights allows peers to pass descriptors (asm/socket.h, Linux 6.16). Accepted connections
// inherit it.
const soPassRights = 83

// refuseRights makes the kernel refuse descriptors passed to a listener's connections. The sender
// gets EPERM. Older kernels lack the option.
func refuseRights(l net.Listener) error {
	u, ok := l.(*net.UnixListener)
	if !ok {
		return nil
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return err
	}
	cerr := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, soPassRights, 0) })
	if errors.Is(err, unix.ENOPROTOOPT) {
		err = nil
	}
	return errors.Join(cerr, err)
}

// Read implements net.Conn. It ends a Unix connection with [ErrRights] if its peer passes
// descriptors.
func (c *Conn) Read(p []byte) (int, error) {
	u, ok := c.Conn.(*net.UnixConn)
	if !ok || len(p) == 0 {
		return c.Conn.Read(p)
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return 0, err
	}
	var n, flags int
	var got error
	if err := raw.Read(func(fd uintptr) bool {
		bounded.Interrupt(func() { n, flags, got = receive(int(fd), p) })
		return got != unix.EAGAIN
	}); err != nil {
		return 0, err
	}
	switch {
	case got == nil && flags&unix.MSG_CTRUNC != 0:
		got = ErrRights
	case got == nil && n == 0:
		return 0, io.EOF
	case got != nil:
		got = os.NewSyscallError("recvmsg", got)
	default:
		return n, nil
	}
	return 0, &net.OpError{Op: "read", Net: "unix", Source: u.LocalAddr(), Addr: u.RemoteAddr(), Err: got}
}

// receive is recvmsg(2) without room for descriptors.
func receive(fd int, p []byte) (n, flags int, err error) {
	for {
		n, _, flags, _, err = unix.Recvmsg(fd, p, nil, unix.MSG_DONTWAIT)
		if err != unix.EINTR {
			return n, flags, err
		}
	}
}

// end closes a connection. It returns when neither a reader nor the kernel holds any part of it.
func end(c net.Conn) error {
	u, ok := c.(*net.UnixConn)
	if !ok {
		return c.Close()
	}
	// The last close of the socket closes the descriptors in its queue. With an active reader,
	// Close would leave that to the reader. A duplicate keeps it for this thread.
	last, err := duplicate(u)
	if err != nil { // no descriptors are free, or the connection is closed
		bounded.Interrupt(func() { err = c.Close() })
		return err
	}
	err = c.Close()
	bounded.Interrupt(func() { unix.Close(last) })
	return err
}

func duplicate(u *net.UnixConn) (fd int, err error) {
	raw, err := u.SyscallConn()
	if err != nil {
		return -1, err
	}
	cerr := raw.Control(func(s uintptr) { fd, err = unix.FcntlInt(s, syscall.F_DUPFD_CLOEXEC, 0) })
	return fd, errors.Join(cerr, err)
}

// enders close refused connections, a few at once.
type enders struct {
	once sync.Once
	room chan struct{}
}

// maxEnders limits their threads. A peer can block one for longer than a moment only with a hanging
// file system.
const maxEnders = 32

func (e *enders) end(c net.Conn) {
	e.once.Do(func() { e.room = make(chan struct{}, maxEnders) })
	e.room <- struct{}{}
	go func() {
		defer func() { <-e.room }()
		_ = end(c) // it was refused
	}()
}
