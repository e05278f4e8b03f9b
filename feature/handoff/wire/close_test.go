// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// lingering is a TCP socket whose close waits for a minute: its peer takes nothing of what it has sent.
func lingering(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	peer, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { peer.Close() }) // resets: what waits ends then
	f, err := c.(*net.TCPConn).File()
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	fd, err := unix.Dup(int(f.Fd()))
	f.Close()
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		t.Fatal(err)
	}
	for b := make([]byte, 1<<20); err == nil; {
		_, err = unix.Write(fd, b)
	}
	if err != unix.EAGAIN {
		t.Fatal(err)
	}
	if err := unix.SetNonblock(fd, false); err != nil { // else the kernel does not wait
		t.Fatal(err)
	}
	if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1, Linger: 60}); err != nil {
		t.Fatal(err)
	}
	return fd
}

// queued is a Unix socket with a descriptor in its queue, which is closed with it.
func queued(t *testing.T, fd int) int {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Sendmsg(pair[0], []byte("x"), unix.UnixRights(fd), nil, 0); err != nil {
		t.Fatal(err)
	}
	unix.Close(pair[0])
	unix.Close(fd)
	return pair[1]
}

// TestCloseAllDoesNotWait closes more lingering sockets than may wait at once, bare and in the queue of a Unix socket.
func TestCloseAllDoesNotWait(t *testing.T) {
	var fds []int
	for i := range maxClosers + 8 {
		fd := lingering(t)
		if i%2 == 1 {
			fd = queued(t, fd)
		}
		fds = append(fds, fd)
	}
	done := make(chan struct{})
	go func() {
		CloseAll(fds)
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(10 * time.Second):
		t.Fatal("closing what a stranger sent waits for the stranger")
	}
}
