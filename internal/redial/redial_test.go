// SPDX-License-Identifier: Apache-2.0

package redial

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// listener returns a Unix listener with a full queue of one connection.
func listener(t *testing.T) (path string, l net.Listener) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	raw, err := l.(*net.UnixListener).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(raw.Control(func(fd uintptr) { err = unix.Listen(int(fd), 0) }), err); err != nil {
		t.Fatal(err)
	}
	for {
		c, err := net.Dial("unix", path)
		if errors.Is(err, syscall.EAGAIN) {
			return path, l
		} else if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
	}
}

// TestDial checks the wait for a full queue.
func TestDial(t *testing.T) {
	path, l := listener(t)
	time.AfterFunc(50*time.Millisecond, func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { c.Close() })
		}
	})
	c, err := Dial(t.Context(), "unix", path)
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
}

// TestDialEnds checks that the wait ends with the context, and applies to no other error.
func TestDialEnds(t *testing.T) {
	path, _ := listener(t)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := Dial(ctx, "unix", path); !errors.Is(err, syscall.EAGAIN) || !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	began := time.Now()
	if _, err := Dial(t.Context(), "unix", path+"2"); !errors.Is(err, syscall.ENOENT) || time.Since(began) > longest/2 {
		t.Error(err)
	}
}
