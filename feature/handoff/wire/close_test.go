// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/nstest"
	"golang.org/x/sys/unix"
)

// queued returns a Unix socket with a descriptor in its queue. Closing the socket closes the
// descriptor.
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

// TestCloseAllDoesNotWait closes more lingering sockets than closers, directly and in the queue of
// a Unix socket.
func TestCloseAllDoesNotWait(t *testing.T) {
	var fds []int
	for i, fd := range nstest.Lingering(t, maxClosers+8) {
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

// TestManyLingeringSockets closes many more sockets than closers, with silent peers.
func TestManyLingeringSockets(t *testing.T) {
	done := make(chan struct{})
	fds := nstest.Lingering(t, 2*(maxClosers+maxWaiting))
	for i, fd := range fds {
		fds[i] = queued(t, fd)
	}
	go func() {
		defer close(done)
		CloseAll(fds)
	}()
	select {
	case <-done:
	case <-time.After(nstest.Timeout()):
		t.Fatal("closing what a stranger sent waits for the stranger")
	}
	nstest.Eventually(t, func() error {
		strangers.mu.Lock()
		defer strangers.mu.Unlock()
		if n := strangers.running + len(strangers.waiting); n > 0 {
			return fmt.Errorf("%d closes wait", n)
		}
		return nil
	})
}

// TestTruncatedDescriptors makes the kernel drop lingering sockets in Receive, by a message with
// too many.
func TestTruncatedDescriptors(t *testing.T) {
	c, far := pair(t)
	fds := nstest.Lingering(t, maxFDs+4)
	if err := unix.Sendmsg(far, []byte("x"), unix.UnixRights(fds...), nil, 0); err != nil {
		t.Fatal(err)
	}
	nstest.Drop(fds...)
	done := make(chan error, 1)
	go func() {
		_, _, err := c.Receive()
		done <- err
	}()
	select {
	case err := <-done:
		if !errors.Is(err, ErrMalformed) {
			t.Error(err)
		}
	case <-time.After(nstest.Timeout()):
		t.Fatal("receiving waits for the peers of what was dropped")
	}
}

// TestClosersAreBounded blocks all closers by one stranger's descriptors. Descriptors of others are
// still closed if possible, and few stay open.
func TestClosersAreBounded(t *testing.T) {
	c := newCloser()
	t.Cleanup(func() { // otherwise descriptors of this test stay open
		c.mu.Lock()
		defer c.mu.Unlock()
		for _, fd := range c.waiting {
			unix.Close(fd)
		}
		c.waiting = nil
		c.room.Broadcast()
	})
	for _, fd := range nstest.Lingering(t, maxClosers) {
		c.closeBounded(queued(t, fd))
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

// TestCloseKeptDoesNotWait closes more lingering connections than closers, as the end of a member
// does.
func TestCloseKeptDoesNotWait(t *testing.T) {
	for _, fd := range nstest.Lingering(t, maxClosers+8) {
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
