// SPDX-License-Identifier: Apache-2.0

package pidfd

import (
	"errors"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestCloseDupDoesNotWait turns a listener into a lingering connection while it is duplicated. The
// close of the duplicate does not wait.
func TestCloseDupDoesNotWait(t *testing.T) {
	socket := func() int {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		return fd
	}
	loopback := func() *unix.SockaddrInet4 { return &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}} }
	peer, theirs := socket(), socket()
	defer unix.Close(peer)
	err := errors.Join(unix.Bind(peer, loopback()), unix.Listen(peer, 1), unix.Bind(theirs, loopback()), unix.Listen(theirs, 1))
	if err != nil {
		t.Fatal(err)
	}
	self, err := Open(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	defer self.Close()
	ours, err := self.Dup(theirs)
	if err != nil {
		t.Skip("need: kernel pidfd_getfd:", err)
	}
	to, err := unix.Getsockname(peer)
	if err != nil {
		t.Fatal(err)
	}
	err = errors.Join(unix.Shutdown(theirs, unix.SHUT_RDWR), unix.Connect(theirs, to), unix.SetNonblock(theirs, true),
		unix.SetsockoptLinger(theirs, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1, Linger: 60}))
	for b := make([]byte, 1<<20); err == nil; {
		_, err = unix.Write(theirs, b)
	}
	if err != unix.EAGAIN {
		t.Fatal(err)
	}
	unix.Close(theirs)
	done := make(chan struct{})
	go func() { CloseDup(ours); close(done) }()
	select {
	case <-done:
	case <-time.After(10 * time.Second):
		t.Fatal("closing the duplicate waits for its process")
	}
}

// TestCloseDupAtOnce checks that a listener is closed and its port free when CloseDup returns.
func TestCloseDupAtOnce(t *testing.T) {
	socket := func() int {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		return fd
	}
	fd := socket()
	if err := unix.Listen(fd, 1); err != nil {
		t.Fatal(err)
	}
	a, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	CloseDup(fd)
	again := socket()
	defer unix.Close(again)
	if err := unix.Bind(again, a); err != nil {
		t.Errorf("the port is not free: %v", err)
	}
}
