// SPDX-License-Identifier: Apache-2.0

package handoff_test

import (
	"io"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/keeper"
)

// A client's urgent byte is one of the stream: the session that got it is transferred like any other.
func TestUrgentByte(t *testing.T) {
	w := newWorld(t, keeper.Options{})
	l, other := w.join("0"), w.join("1")
	c := dial(t, l.Addr())
	s, err := l.AcceptSession()
	if err != nil {
		t.Fatal(err)
	}
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range []struct {
		text  string
		flags int
	}{{"ab", 0}, {"!", unix.MSG_OOB}, {"cd", 0}} {
		var serr error
		if err := raw.Write(func(fd uintptr) bool {
			serr = unix.Sendto(int(fd), []byte(part.text), part.flags, nil)
			return serr != unix.EAGAIN
		}); err != nil || serr != nil {
			t.Fatal(err, serr)
		}
	}
	defer time.AfterFunc(patience, func() { c.Close() }).Stop() // a read that waits for the byte ends
	b := make([]byte, 5)
	if _, err := io.ReadFull(s, b); err != nil || string(b) != "ab!cd" {
		t.Fatalf("read %q, %v", b, err)
	}
	if err := s.Commit([]byte("state")); err != nil {
		t.Fatal(err)
	}
	if err := l.Member().TransferCommitted(s, "1"); err != nil {
		t.Fatalf("a session with an urgent byte is not transferred: %v", err)
	}
	moved, err := other.AcceptSession()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write([]byte("e")); err != nil {
		t.Fatal(err)
	}
	if n, err := moved.Read(b); err != nil || string(b[:n]) != "e" || string(moved.State()) != "state" {
		t.Errorf("after the transfer: read %q, state %q, %v", b[:n], moved.State(), err)
	}
}
