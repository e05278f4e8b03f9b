// SPDX-License-Identifier: Apache-2.0

package handoff_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/feature/handoff/keeper"
	"github.com/weir-project/weir/internal/nstest"
)

// TestMoves moves a session between two running members under traffic, with states in a message and
// in a memfd.
func TestMoves(t *testing.T) {
	moves := 250
	if testing.Short() {
		moves = 50
	}
	w := newWorld(t, keeper.Options{})
	for i, padding := range []int{0, 100_000} {
		w.address = freeAddress(t) // the keeper keeps the listeners for a while
		a := w.memberAt(w.address, fmt.Sprint("a", i), padding)
		b := w.memberAt(freeAddress(t), fmt.Sprint("b", i), padding)
		c := w.client()
		c.run()
		for j := range moves {
			time.Sleep(time.Duration(rand.IntN(3000)) * time.Microsecond)
			from, to := a, fmt.Sprint("b", i)
			if j%2 == 1 {
				from, to = b, fmt.Sprint("a", i)
			}
			// The member may not have accepted it yet, or the receiver not taken it: repeat the
			// order.
			before := w.counts()
			nstest.Until(t, "the session moves to "+to, func() bool {
				from.Tell("move " + to)
				from.Expect("move done: <nil>")
				return w.counts().Transfers > before.Transfers
			})
		}
		c.finish()
		n := w.counts()
		t.Logf("%d bytes of state: %d messages, %+v", padding, c.count.Load(), n)
		if n.Rejected+n.Gaps > 0 {
			t.Errorf("%+v", n)
		}
		a.Kill()
		b.Kill()
	}
}

// TestHotRestart starts new processes of a name. Each gets everything of its predecessor, which
// ends by itself. No connection fails meanwhile.
func TestHotRestart(t *testing.T) {
	restarts := 20
	if testing.Short() {
		restarts = 5
	}
	w := newWorld(t, keeper.Options{})
	old := w.member("0", 0)
	streams := []*client{w.client(), w.client(), w.client()}
	for _, c := range streams {
		c.run()
	}
	nstest.Until(t, "all are kept", func() bool { return len(w.sessions("session")) == len(streams) })
	// In parallel, short connections.
	stop := make(chan struct{})
	var short sync.WaitGroup
	count := 0
	short.Go(func() {
		for ; ; count++ {
			select {
			case <-stop:
				return
			default:
			}
			c := w.client()
			c.run()
			time.Sleep(time.Millisecond)
			c.finish()
			c.conn.Close()
		}
	})
	for range restarts {
		streams[0].hears(20)
		m := w.member("0", 0)
		old.Expect("stopped: true")
		if err := old.End(); err != nil {
			t.Errorf("the replaced process: %v", err)
		}
		old = m
	}
	close(stop)
	short.Wait()
	for _, c := range streams {
		c.finish()
	}
	n := w.counts()
	t.Logf("%d short connections, %+v", count, n)
	// Sessions reaching a replaced process too late go to the next one by inheritance.
	if n.Transfers+n.Inherited < uint64(restarts)*3 || n.Gaps+n.Closed+n.Expired > 0 {
		t.Errorf("%+v", n)
	}
}

// TestTransfer transfers from the application's own code, with a partial message, a state, and
// queued bytes, and back.
func TestTransfer(t *testing.T) {
	w := newWorld(t, keeper.Options{})
	listen := func(name string) *handoff.Listener {
		l, err := handoff.Listen(t.Context(), "tcp", "127.0.0.1:0", handoff.Options{Service: "talk", Name: name, Keeper: w.socket, Timeout: patience})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		return l
	}
	a, b := listen("a"), listen("b")
	peer, err := net.Dial("tcp", a.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close()
	accept := func(l *handoff.Listener) *handoff.Session {
		t.Helper()
		s, err := l.AcceptSession()
		if err != nil {
			t.Fatal(err)
		}
		s.SetDeadline(time.Now().Add(patience))
		return s
	}
	read := func(s *handoff.Session, want string) {
		t.Helper()
		got := make([]byte, len(want))
		for n := 0; n < len(want); {
			m, err := s.Read(got[n:])
			if err != nil {
				t.Fatalf("read %q, %v; want %q", got[:n], err, want)
			}
			n += m
		}
		if string(got) != want {
			t.Fatalf("read %q, want %q", got, want)
		}
	}
	write := func(c net.Conn, b string) {
		t.Helper()
		if _, err := c.Write([]byte(b)); err != nil {
			t.Fatal(err)
		}
	}
	hear := func(want string) {
		t.Helper()
		got := make([]byte, len(want))
		peer.SetReadDeadline(time.Now().Add(patience))
		if n, err := peer.Read(got); err != nil || string(got[:n]) != want {
			t.Fatalf("the peer gets %q, %v; want %q", got[:n], err, want)
		}
	}
	s := accept(a)
	if s.Received() || s.State() != nil {
		t.Errorf("a new session: received %v, state %q", s.Received(), s.State())
	}
	write(peer, "one two thr")
	read(s, "one two thr")
	write(s, "1 2 ")
	hear("1 2 ")
	set(t, s, [3]int{0, 1, 77})
	if err := a.Member().TransferExcept(s, "b", len("thr"), []byte("after two")); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Read(make([]byte, 9)); err != handoff.ErrMoved {
		t.Errorf("read of a moved session: %v", err)
	}
	if _, err := s.Write([]byte("x")); err != handoff.ErrMoved {
		t.Errorf("write to a moved session: %v", err)
	}
	if err := s.Commit(nil); err != handoff.ErrMoved {
		t.Errorf("commit of a moved session: %v", err)
	}
	write(peer, "ee four")
	s = accept(b)
	if got := options(t, s); got != [3]int{0, 1, 77} {
		t.Errorf("no delay, keepalive and its time are %v with the other, want them as they were set", got)
	}
	if !s.Received() || s.Crashed() || string(s.State()) != "after two" || !s.Kept() {
		t.Errorf("received %v, crashed %v, state %q, kept %v", s.Received(), s.Crashed(), s.State(), s.Kept())
	}
	read(s, "thr") // first the bytes already read by the other
	read(s, "ee four")
	if r, wr := s.Positions(); r != 18 || wr != 4 {
		t.Errorf("positions %d, %d; want 18, 4", r, wr)
	}
	// Part of the read bytes is committed and moved as committed. The rest is read again, and
	// repeated writes are not sent twice.
	if err := s.CommitExcept(len("four"), []byte("after three")); err != nil {
		t.Fatal(err)
	}
	write(s, "4 ")
	hear("4 ")
	write(peer, " five")
	read(s, " five")
	if err := b.Member().TransferCommitted(s, "a"); err != nil {
		t.Fatal(err)
	}
	s = accept(a)
	if string(s.State()) != "after three" {
		t.Errorf("state %q", s.State())
	}
	read(s, "four five")
	write(s, "4 ")
	write(s, "5 ")
	hear("5 ")
	if err := s.Commit([]byte("after five")); err != nil {
		t.Fatal(err)
	}
	if err := s.CommitExcept(1, nil); err == nil {
		t.Error("more was unparsed than read")
	}
	// Errors leave the session with its owner.
	if err := a.Transfer(s, "c", nil); !errors.Is(err, handoff.ErrNoPeer) {
		t.Errorf("to nobody: %v", err)
	}
	if err := a.Transfer(s, "b", make([]byte, 2<<20)); !errors.Is(err, handoff.ErrLimit) {
		t.Errorf("with too large a state: %v", err)
	}
	write(peer, "six")
	read(s, "six")
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if n, err := peer.Read(make([]byte, 1)); n != 0 || err == nil || err.Error() != "EOF" {
		t.Errorf("after Close the peer reads %d, %v; want the end", n, err)
	}
	nstest.Until(t, "the keeper has let go", func() bool { return len(w.sessions("session")) == 0 })
}

// The options changed by net.FileConn.
var shared = [3][2]int{{unix.IPPROTO_TCP, unix.TCP_NODELAY}, {unix.SOL_SOCKET, unix.SO_KEEPALIVE}, {unix.IPPROTO_TCP, unix.TCP_KEEPIDLE}}

func control(t testing.TB, s *handoff.Session, f func(fd, i int) error) {
	t.Helper()
	raw, err := s.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	cerr := raw.Control(func(fd uintptr) {
		for i := range shared {
			err = errors.Join(err, f(int(fd), i))
		}
	})
	if err = errors.Join(cerr, err); err != nil {
		t.Fatal(err)
	}
}

func options(t testing.TB, s *handoff.Session) (out [3]int) {
	t.Helper()
	control(t, s, func(fd, i int) (err error) {
		out[i], err = unix.GetsockoptInt(fd, shared[i][0], shared[i][1])
		return err
	})
	return out
}

func set(t testing.TB, s *handoff.Session, to [3]int) {
	t.Helper()
	control(t, s, func(fd, i int) error { return unix.SetsockoptInt(fd, shared[i][0], shared[i][1], to[i]) })
}

// TestTransferWhileWaiting checks that a move interrupts a waiting reader and writer. After a
// failed move their deadlines still apply.
func TestTransferWhileWaiting(t *testing.T) {
	w := newWorld(t, keeper.Options{})
	l, err := handoff.Listen(t.Context(), "tcp", "127.0.0.1:0", handoff.Options{Service: "talk", Name: "a", Keeper: w.socket, Timeout: patience})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	peer, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close()
	s, err := l.AcceptSession()
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 2)
	go func() {
		_, err := s.Read(make([]byte, 1))
		ended <- err
	}()
	go func() {
		_, err := s.Write(make([]byte, 64<<20)) // the peer does not read them
		ended <- err
	}()
	time.Sleep(50 * time.Millisecond)
	if err := l.Transfer(s, "b", nil); !errors.Is(err, handoff.ErrNoPeer) {
		t.Fatalf("to nobody: %v", err)
	}
	select {
	case err := <-ended:
		t.Fatalf("ended by a failed transfer: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	b, err := handoff.Listen(t.Context(), "tcp", "127.0.0.1:0", handoff.Options{Service: "talk", Name: "b", Keeper: w.socket, Timeout: patience})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	if err := l.Transfer(s, "", nil); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := <-ended; err != handoff.ErrMoved {
			t.Errorf("waiting call: %v, want ErrMoved", err)
		}
	}
	s, err = b.AcceptSession()
	if err != nil {
		t.Fatal(err)
	}
	s.SetReadDeadline(time.Now().Add(30 * time.Millisecond))
	if err := b.Transfer(s, "c", nil); !errors.Is(err, handoff.ErrNoPeer) {
		t.Errorf("to nobody: %v", err)
	}
	if _, err := s.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("after the deadline: %v", err)
	}
}
