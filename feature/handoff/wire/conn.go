// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/accept"
	"github.com/weir-project/weir/internal/bounded"
	"github.com/weir-project/weir/internal/redial"
)

// ErrFull reports that the receiver has not read earlier messages.
var ErrFull = errors.New("the receiver's queue is full")

// ErrEmpty reports that no message is waiting.
var ErrEmpty = errors.New("no message is waiting")

// Conn carries messages and descriptors. Send, TrySend and Close are safe for concurrent use. Only
// one goroutine may call Receive.
type Conn struct {
	u   *net.UnixConn
	raw syscall.RawConn

	mu  sync.Mutex // guards out; never held together with Board.mu or closer.mu
	out []byte

	in  []byte
	oob []byte
}

// sndbuf has room for the largest messages.
const sndbuf = 1 << 20

// UIDEnv is the environment variable with the uid of a trusted keeper, besides root's and this
// process's own: see [accept.CheckServer].
const UIDEnv = "WEIR_HANDOFF_UID"

// Dial connects to a keeper at a path, or at an abstract name beginning with @. It checks the
// keeper's user with the kernel.
func Dial(ctx context.Context, path string) (*Conn, error) {
	if err := accept.CheckPath(path); err != nil {
		return nil, err
	}
	c, err := redial.Dial(ctx, "unixpacket", path)
	if err != nil {
		return nil, err
	}
	if err := accept.CheckServer(c, path, UIDEnv); err != nil {
		c.Close()
		return nil, err
	}
	return NewConn(c.(*net.UnixConn))
}

// NewConn returns a Conn that owns a SOCK_SEQPACKET connection.
func NewConn(u *net.UnixConn) (*Conn, error) {
	raw, err := u.SyscallConn()
	if err != nil {
		return nil, err
	}
	u.SetWriteBuffer(sndbuf) // the kernel's limit may be lower; a message of maxMessage fits the default
	return &Conn{u: u, raw: raw, in: make([]byte, maxMessage+1), oob: make([]byte, unix.CmsgSpace(4*maxFDs))}, nil
}

// Close closes the connection.
func (c *Conn) Close() error { return c.u.Close() }

// SyscallConn returns the raw socket.
func (c *Conn) SyscallConn() syscall.RawConn { return c.raw }

// SetReadDeadline bounds Receive.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.u.SetReadDeadline(t) }

// Send sends a message and waits for room. The caller keeps the descriptors.
func (c *Conn) Send(m *Message, fds ...int) error { return c.send(m, fds, true) }

// TrySend is Send without waiting. It returns ErrFull if there is no room.
func (c *Conn) TrySend(m *Message, fds ...int) error { return c.send(m, fds, false) }

func (c *Conn) send(m *Message, fds []int, wait bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	b, err := m.Append(c.out[:0])
	c.out = b[:0]
	if err != nil {
		return err
	}
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	var sent error
	err = c.raw.Write(func(fd uintptr) bool {
		for {
			_, sent = unix.SendmsgN(int(fd), b, oob, nil, unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT)
			if sent == unix.EINTR {
				continue
			}
			if sent == unix.ETOOMANYREFS && wait {
				// Too many of this user's descriptors are in flight. The receiver must read some first.
				time.Sleep(time.Millisecond)
				continue
			}
			return sent != unix.EAGAIN || !wait
		}
	})
	switch {
	case err != nil:
		return err
	case sent == unix.EAGAIN, sent == unix.ETOOMANYREFS:
		return ErrFull
	case sent != nil:
		return fmt.Errorf("send: %w", sent)
	}
	return nil
}

// Receive waits for a message. Its State is valid until the next call. The caller owns its
// descriptors, which are close-on-exec. The error is [io.EOF] at the end. It wraps [ErrMalformed]
// for a malformed message, with its descriptors closed.
func (c *Conn) Receive() (Message, []int, error) {
	var r received
	err := c.raw.Read(func(fd uintptr) bool {
		bounded.Interrupt(func() { r = c.recvmsg(fd) })
		return r.err != unix.EAGAIN
	})
	return c.parse(r, err)
}

// TryReceive is Receive without waiting, independent of the deadline. It returns ErrEmpty if there
// is no message.
func (c *Conn) TryReceive() (Message, []int, error) {
	var r received
	err := c.raw.Control(func(fd uintptr) { bounded.Interrupt(func() { r = c.recvmsg(fd) }) })
	return c.parse(r, err)
}

// received is the result of recvmsg(2).
type received struct {
	n, oobn, flags int
	err            error
}

// recvmsg receives a message. The kernel drops descriptors over the limit.
func (c *Conn) recvmsg(fd uintptr) (r received) {
	for {
		r.n, r.oobn, r.flags, _, r.err = unix.Recvmsg(int(fd), c.in, c.oob, unix.MSG_CMSG_CLOEXEC|unix.MSG_DONTWAIT)
		// A peer that closes with unread data resets the connection. The kernel reports the reset
		// once, before the peer's messages.
		if r.err != unix.EINTR && r.err != unix.ECONNRESET {
			return r
		}
	}
}

func (c *Conn) parse(r received, err error) (Message, []int, error) {
	n, oobn, flags, got := r.n, r.oobn, r.flags, r.err
	switch {
	case err != nil:
		return Message{}, nil, err
	case got == unix.EAGAIN:
		return Message{}, nil, ErrEmpty
	case got == nil && n == 0 && oobn == 0:
		return Message{}, nil, io.EOF
	case got != nil:
		return Message{}, nil, fmt.Errorf("receive: %w", got)
	}
	fds, err := descriptors(c.oob[:oobn])
	// With fewer descriptors than the limit this process has none left. The message itself is
	// complete, so its sender can get an error.
	cut := flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) == unix.MSG_CTRUNC && len(fds) < maxFDs
	if err == nil && !cut && flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		err = fmt.Errorf("%w: longer than %d bytes, or with more than %d descriptors", ErrMalformed, maxMessage, maxFDs)
	}
	var m Message
	if err == nil {
		m, err = parse(c.in[:n])
	}
	if err != nil {
		CloseAll(fds)
		return Message{}, nil, err
	}
	if m.Cut = cut; cut { // unknown which of them is missing
		CloseAll(fds)
		fds = nil
	}
	return m, fds, nil
}

// ErrNoDescriptors is the error about a message with missing descriptors, see Message.Cut.
func ErrNoDescriptors() *CodeError {
	n := "its limit"
	var r unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &r) == nil {
		n = fmt.Sprint(r.Cur)
	}
	return Errorf(Limit, "no descriptors left: process %d may have %s (RLIMIT_NOFILE; LimitNOFILE= of its unit)", os.Getpid(), n)
}

// descriptors returns the descriptors in a message's control data.
func descriptors(oob []byte) ([]int, error) {
	if len(oob) == 0 {
		return nil, nil
	}
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("%w: control data: %w", ErrMalformed, err)
	}
	var out []int
	for _, c := range messages {
		if c.Header.Level != unix.SOL_SOCKET || c.Header.Type != unix.SCM_RIGHTS {
			continue
		}
		fds, err := unix.ParseUnixRights(&c)
		if err != nil {
			return out, fmt.Errorf("%w: descriptors: %w", ErrMalformed, err)
		}
		out = append(out, fds...)
	}
	return out, nil
}

// CloseAll closes descriptors, including passed ones. It does not block unless strangers
// block very many at once: see closer. It must not be called under a lock.
func CloseAll(fds []int) {
	for _, fd := range fds {
		if lingers(fd) {
			strangers.closeBounded(fd)
		} else {
			closeNow(fd)
		}
	}
}

// Socket returns the path of the keeper: the argument, else the environment's, else the default.
func Socket(path string) string {
	if path == "" {
		path = os.Getenv(SocketEnv)
	}
	if path == "" {
		path = DefaultSocket
	}
	return path
}

// WaitWritable waits until the receiver has read some messages.
func (c *Conn) WaitWritable() error {
	return c.raw.Write(func(fd uintptr) bool {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
		n, err := unix.Poll(p, 0)
		return n > 0 || err != nil && err != unix.EINTR
	})
}

// Ended reports whether the other side has closed the connection, even with messages still unread
// here.
func (c *Conn) Ended() bool {
	ended := false
	err := c.raw.Control(func(fd uintptr) {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		n, _ := unix.Poll(p, 0)
		ended = n > 0
	})
	return ended || err != nil
}

// Unread reports whether the other side has unread messages.
func (c *Conn) Unread() bool {
	n := 0
	err := c.raw.Control(func(fd uintptr) { n, _ = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) })
	return n > 0 && err == nil
}

// SendWithin is Send with a timeout. The error is then [os.ErrDeadlineExceeded]. A Conn can have
// one such call at a time.
func (c *Conn) SendWithin(d time.Duration, m *Message, fds ...int) error {
	err := c.TrySend(m, fds...)
	if !errors.Is(err, ErrFull) {
		return err
	}
	c.u.SetWriteDeadline(time.Now().Add(d))
	defer c.u.SetWriteDeadline(time.Time{})
	return c.Send(m, fds...)
}
