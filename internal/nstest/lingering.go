// SPDX-License-Identifier: Apache-2.0

package nstest

import (
	"net"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/bounded"
)

// Lingering creates n TCP sockets with a last close that blocks for ten minutes, because their
// peers do not read. The caller owns them. The peers reset them at the end of the test.
func Lingering(t testing.TB, n int) (fds []int) {
	t.Helper()
	small := func(option int) func(network, address string, c syscall.RawConn) error {
		return func(_, _ string, c syscall.RawConn) (err error) {
			if cerr := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, option, 4096) }); cerr != nil {
				return cerr
			}
			return err
		}
	}
	lc := net.ListenConfig{Control: small(unix.SO_RCVBUF)}
	lc.SetMultipathTCP(false)
	l, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	d := net.Dialer{Control: small(unix.SO_SNDBUF)}
	d.SetMultipathTCP(false)
	for range n {
		c, err := d.DialContext(t.Context(), "tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		peer, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { peer.Close() })
		fds = append(fds, linger(t, c.(*net.TCPConn)))
	}
	return fds
}

// linger returns the socket of a connection with a full queue and a blocking close.
func linger(t testing.TB, c *net.TCPConn) int {
	t.Helper()
	f, err := c.File()
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	fd, err := unix.Dup(int(f.Fd()))
	f.Close()
	if err != nil {
		t.Fatal(err)
	}
	unix.CloseOnExec(fd)
	if err := unix.SetNonblock(fd, true); err != nil {
		t.Fatal(err)
	}
	for b := make([]byte, 1<<20); err == nil; {
		_, err = unix.Write(fd, b)
	}
	if err != unix.EAGAIN {
		t.Fatal(err)
	}
	if err := unix.SetNonblock(fd, false); err != nil { // else the close does not block
		t.Fatal(err)
	}
	if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1, Linger: 600}); err != nil {
		t.Fatal(err)
	}
	return fd
}

// Drop closes sockets of [Lingering] without a wait, also if no other process has them.
func Drop(fds ...int) {
	for _, fd := range fds {
		bounded.Interrupt(func() { unix.Close(fd) })
	}
}
