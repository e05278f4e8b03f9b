// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"fmt"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/nstest"
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

// TestClosersAreBounded has a stranger make all closers wait: what others pass is closed all the same while it can be, and no
// more than a few descriptors stay open.
func TestClosersAreBounded(t *testing.T) {
	c := newCloser()
	t.Cleanup(func() { // else descriptors of this test stay open
		c.mu.Lock()
		defer c.mu.Unlock()
		for _, fd := range c.waiting {
			unix.Close(fd)
		}
		c.waiting = nil
		c.room.Broadcast()
	})
	for range maxClosers {
		c.closeBounded(queued(t, lingering(t)))
	}
	sockets := make(chan struct{})
	go func() {
		defer close(sockets)
		for range 2 * maxWaiting {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				t.Error(err)
				return
			}
			c.closeBounded(fd)
		}
	}()
	select {
	case <-sockets:
	case <-time.After(10 * time.Second):
		t.Fatal("closing a socket waits for strangers")
	}
	var passed atomic.Int32
	full := make(chan struct{})
	go func() {
		for range 10 * maxWaiting {
			pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return
			}
			unix.Close(pair[0])
			if passed.Add(1) == maxWaiting+1 {
				close(full)
			}
			c.closeBounded(pair[1])
		}
	}()
	select {
	case <-full:
	case <-time.After(10 * time.Second):
		t.Fatalf("%d descriptors wait", passed.Load())
	}
	c.mu.Lock()
	n := len(c.waiting)
	c.mu.Unlock()
	if n > maxWaiting {
		t.Errorf("%d descriptors stay open, want at most %d", n, maxWaiting)
	}
}

// TestCloseKeptDoesNotWait closes more lingering connections than threads may be, as a member's end does.
func TestCloseKeptDoesNotWait(t *testing.T) {
	var fds []int
	for range maxClosers + 8 {
		fds = append(fds, lingering(t))
	}
	for _, fd := range fds {
		CloseKept("a test", fd, false)
	}
	nstest.Eventually(t, func() error {
		kept.mu.Lock()
		n := kept.running + len(kept.waiting)
		kept.mu.Unlock()
		if n == 0 {
			return nil
		}
		return fmt.Errorf("%d closes wait", n)
	})
}
