// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// pair returns a connection and its other end as a bare descriptor.
func pair(t testing.TB) (*Conn, int) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fds[0]), "pair")
	n, err := net.FileConn(f)
	f.Close()
	if err != nil {
		t.Fatal(err)
	}
	c, err := NewConn(n.(*net.UnixConn))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close(); unix.Close(fds[1]) })
	return c, fds[1]
}

func conns(t testing.TB) (a, b *Conn) {
	t.Helper()
	a, fd := pair(t)
	dup, err := unix.Dup(fd)
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(fd)
	f := os.NewFile(uintptr(dup), "pair")
	defer f.Close()
	n, err := net.FileConn(f)
	if err != nil {
		t.Fatal(err)
	}
	if b, err = NewConn(n.(*net.UnixConn)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	return a, b
}

func openDescriptors(t testing.TB) int {
	t.Helper()
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(d)
}

func TestConn(t *testing.T) {
	a, b := conns(t)
	state := bytes.Repeat([]byte("s"), MaxInline)
	p, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(p)
	large, err := newStateFD(bytes.Repeat([]byte("l"), 3<<20))
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(large)
	if err := a.Send(&Message{Type: Keep, Session: 5, State: state}, p, large); err != nil {
		t.Fatal(err)
	}
	m, fds, err := b.Receive()
	if err != nil || m.Session != 5 || !bytes.Equal(m.State, state) || len(fds) != 2 {
		t.Fatalf("got session %d, %d bytes of state, descriptors %v, %v", m.Session, len(m.State), fds, err)
	}
	defer CloseAll(fds)
	for i, fd := range fds {
		var x, y unix.Stat_t
		if err := errors.Join(unix.Fstat([]int{p, large}[i], &x), unix.Fstat(fd, &y)); err != nil || x.Ino != y.Ino {
			t.Errorf("descriptor %d is not what was sent: %v", i, err)
		}
		if f, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil || f&unix.FD_CLOEXEC == 0 {
			t.Errorf("descriptor %d stays open over exec: %v", i, err)
		}
	}
	if got, err := readStateFD(fds[1], 3<<20); err != nil || len(got) != 3<<20 || got[1<<20] != 'l' {
		t.Errorf("the state: %d bytes, %v", len(got), err)
	}
	if _, err := readStateFD(fds[1], 3<<20-1); !errors.Is(err, ErrLimit) {
		t.Errorf("over the limit: %v", err)
	}
	if _, err := unix.Write(fds[1], []byte("x")); err == nil {
		t.Error("the memfd is not sealed")
	}
	a.Close()
	if _, _, err := b.Receive(); err != io.EOF {
		t.Errorf("after the end: %v, want EOF", err)
	}
}

// TestReceiveMalformed checks that malformed messages return an error and leak no descriptor.
func TestReceiveMalformed(t *testing.T) {
	good, _ := (&Message{Type: Hello}).Append(nil)
	c, fd := pair(t)
	before := openDescriptors(t)
	for _, x := range []struct {
		name string
		b    []byte
		fds  []int
	}{
		{"short", []byte("x"), []int{0}},
		{"too long", make([]byte, maxMessage+2), []int{0}},
		{"three descriptors", good, []int{0, 0, 0}},
		{"many descriptors", good, make([]int, 250)},
	} {
		if err := unix.Sendmsg(fd, x.b, unix.UnixRights(x.fds...), nil, 0); err != nil {
			t.Fatal(err)
		}
		if m, fds, err := c.Receive(); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %+v, %v, %v; want malformed", x.name, m, fds, err)
		}
	}
	if got := openDescriptors(t); got != before {
		t.Errorf("%d descriptors are open, %d were", got, before)
	}
	if err := unix.Sendmsg(fd, good, nil, nil, 0); err != nil {
		t.Fatal(err)
	}
	if m, _, err := c.Receive(); err != nil || m.Type != Hello {
		t.Errorf("after all that: %+v, %v", m, err)
	}
}

func TestTrySendFull(t *testing.T) {
	c, fd := pair(t)
	m := Message{Type: Give, State: make([]byte, MaxInline)}
	sent := 0
	var err error
	for ; err == nil && sent < 1000; sent++ {
		err = c.TrySend(&m)
	}
	if !errors.Is(err, ErrFull) {
		t.Fatalf("after %d messages: %v, want full", sent, err)
	}
	b := make([]byte, maxMessage)
	for range 4 {
		if _, err := unix.Read(fd, b); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Send(&m); err != nil {
		t.Errorf("after some were read: %v", err)
	}
	unix.Shutdown(fd, unix.SHUT_RDWR)
	if err := c.TrySend(&m); err == nil || errors.Is(err, ErrFull) {
		t.Errorf("to nobody: %v", err)
	}
}

func TestStateFDRefusesUnsealed(t *testing.T) {
	fd, err := unix.MemfdCreate("x", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if _, err := checkStateFD(fd); !errors.Is(err, ErrBadSocket) {
		t.Errorf("unsealed: %v", err)
	}
	if _, err := checkStateFD(0); !errors.Is(err, ErrBadSocket) {
		t.Errorf("no memfd: %v", err)
	}
}

func TestSpill(t *testing.T) {
	m := Message{Type: Commit, State: bytes.Repeat([]byte("s"), MaxInline), Unread: []byte("u")}
	small := Message{Type: Commit, State: m.State}
	if fd, err := small.Spill(); fd != -1 || err != nil || len(small.State) != MaxInline {
		t.Errorf("a message that has room: %d, %v", fd, err)
	}
	fd, err := m.Spill()
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	b, err := m.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	got, err := parse(b)
	if err != nil || len(got.State) != 0 || got.Sizes != [2]uint64{MaxInline, 1} {
		t.Fatalf("%+v, %v", got, err)
	}
	if err := got.Fetch(fd, MaxInline); !errors.Is(err, ErrLimit) {
		t.Errorf("over the limit: %v", err)
	}
	if err := got.Fetch(fd, MaxInline+1); err != nil || !bytes.Equal(got.State, small.State) || string(got.Unread) != "u" {
		t.Errorf("%d bytes of state, unread %q, %v", len(got.State), got.Unread, err)
	}
	lie := Message{Flags: StateFD, Sizes: [2]uint64{1 << 40, 5}}
	if err := lie.Fetch(fd, 1<<20); !errors.Is(err, ErrBadSocket) {
		t.Errorf("of another size: %v", err)
	}
}

// TestClosedWithSomethingUnread checks that sent messages arrive even if their sender closes with
// unread ones.
func TestClosedWithSomethingUnread(t *testing.T) {
	a, b := conns(t)
	if err := errors.Join(a.Send(&Message{Type: Commit, Session: 7}), b.Send(&Message{Type: OK})); err != nil {
		t.Fatal(err)
	}
	a.Close()
	if m, _, err := b.Receive(); err != nil || m.Session != 7 {
		t.Errorf("%+v, %v", m, err)
	}
	if _, _, err := b.Receive(); err != io.EOF {
		t.Errorf("%v, want the end", err)
	}
}

// TestNoRoomForDescriptors checks that a receiver out of descriptors gets the message without them,
// and the next one complete.
func TestNoRoomForDescriptors(t *testing.T) {
	a, b := conns(t)
	for range 2 {
		if err := a.Send(&Message{Type: Keep, Session: 7}, 0); err != nil {
			t.Fatal(err)
		}
	}
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 3, Max: was.Max}); err != nil {
		t.Fatal(err)
	}
	m, fds, err := b.Receive()
	said := ErrNoDescriptors()
	if e := unix.Setrlimit(unix.RLIMIT_NOFILE, &was); e != nil {
		t.Fatal(e)
	}
	if err != nil || !m.Cut || m.Session != 7 || len(fds) != 0 || !errors.Is(said, ErrLimit) {
		t.Errorf("%+v, %v, %v, %v", m, fds, err, said)
	}
	if m, fds, err = b.Receive(); err != nil || m.Cut || len(fds) != 1 {
		t.Errorf("%+v, %v, %v", m, fds, err)
	}
	CloseAll(fds)
}
