// SPDX-License-Identifier: Apache-2.0

package accept

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/nstest"
)

// stuckConn is a connection with a blocking close, like a reader of passed descriptors.
type stuckConn struct {
	net.Conn
	free chan struct{}
}

func (c stuckConn) Close() error { <-c.free; return c.Conn.Close() }

// TestStuckConnectionsCount checks that a connection counts until it is really closed. A user with
// blocked readers gets no more connections, and others are served.
func TestStuckConnectionsCount(t *testing.T) {
	l := New(&scripted{}, Options{Strangers: 12, PerPeer: 4, Handshake: time.Millisecond, Log: slog.New(slog.DiscardHandler)})
	free := make(chan struct{})
	stuck := func(uid uint32) *Conn { return l.enter(stuckConn{pipe(t), free}, user(uid)) }
	for i := range 200 {
		if c := stuck(7); (c != nil) != (i < 4) {
			t.Fatalf("connection %d: %v", i, c)
		}
	}
	if c := l.enter(pipe(t), user(8)); c == nil {
		t.Error("another user is refused")
	} else {
		c.Close()
	}
	for uid := range uint32(100) {
		stuck(100 + uid)
	}
	if l.count != 12 {
		t.Errorf("%d connections are stuck", l.count)
	}
	if l.enter(pipe(t), user(0)) == nil {
		t.Error("root is refused")
	}
	close(free)
	nstest.Eventually(t, func() error {
		if c := l.enter(pipe(t), user(7)); c != nil {
			return c.Close()
		}
		return errors.New("refused when nothing is stuck")
	})
}

// TestHeldConnectionsCount checks that a held connection counts until its user has released it,
// too.
func TestHeldConnectionsCount(t *testing.T) {
	l := New(&scripted{}, Options{PerPeer: 1, Held: true, Log: slog.New(slog.DiscardHandler)})
	c := l.enter(pipe(t), user(7))
	c.Close()
	if l.enter(pipe(t), user(7)) != nil {
		t.Error("it does not count")
	}
	c.Release()
	if l.enter(pipe(t), user(7)) == nil {
		t.Error("it counts")
	}
}

// world is a listener that reads its connections to the end.
type world struct {
	path   string
	active atomic.Int32
}

func newWorld(t *testing.T, handle func(*Conn)) *world {
	dir, err := os.MkdirTemp("", "accept") // accessible to every user
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	w := &world{path: filepath.Join(dir, "socket")}
	raw, err := Unix(w.path)
	if err != nil {
		t.Fatal(err)
	}
	if err := Permit(w.path, -1, 0o666); err != nil {
		t.Fatal(err)
	}
	l := New(raw, Options{PerPeer: 16, Log: slog.New(slog.DiscardHandler)})
	go func() {
		for {
			c, err := l.Next()
			if err != nil {
				return
			}
			w.active.Add(1)
			go func() { defer w.active.Add(-1); defer c.Close(); handle(c) }()
		}
	}()
	t.Cleanup(func() { l.Close() })
	return w
}

// pass connects and passes a descriptor.
func (w *world) pass(fd int) error {
	c, err := net.Dial("unix", w.path)
	if err != nil {
		return err
	}
	defer c.Close()
	_, _, err = c.(*net.UnixConn).WriteMsgUnix([]byte("P"), unix.UnixRights(fd), nil)
	nstest.Drop(fd)
	if errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) {
		return nil // refused
	}
	return err
}

// answers sends a request as another user.
func (w *world) answers(t *testing.T) {
	t.Helper()
	nstest.AsUser(t, 65533, func() error {
		c, err := net.Dial("unix", w.path)
		if err != nil {
			return err
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(nstest.Timeout()))
		if _, err := c.Write([]byte("x")); err != nil {
			return err
		}
		if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
			return fmt.Errorf("another user gets no answer: %w", err)
		}
		return nil
	})
}

// TestPassedToReader passes descriptors with a blocking close to a reader without use for them. The
// reader continues.
func TestPassedToReader(t *testing.T) {
	nstest.NeedRoot(t)
	var refused atomic.Int32
	w := newWorld(t, func(c *Conn) {
		b := make([]byte, 1)
		switch _, err := c.Read(b); {
		case errors.Is(err, ErrRights):
			refused.Add(1)
		case err == nil:
			_, _ = c.Write(b)
		}
	})
	w.passLingering(t)
	w.answers(t)
	nstest.Eventually(t, func() error {
		if n := w.active.Load(); n > 0 {
			return fmt.Errorf("%d readers wait", n)
		}
		return nil
	})
	if refused.Load() == 0 {
		t.Error("passing descriptors is no error")
	}
}

// passLingering passes a hundred descriptors with a blocking close as another user.
func (w *world) passLingering(t *testing.T) {
	t.Helper()
	fds := nstest.Lingering(t, 100)
	nstest.AsUser(t, 65534, func() error {
		for _, fd := range fds {
			if err := w.pass(fd); err != nil {
				return err
			}
		}
		return nil
	})
}

// TestPassedToRefused does so for the queues of unread connections: refused ones, and connections closed at their deadline.
func TestPassedToRefused(t *testing.T) {
	nstest.NeedRoot(t)
	gone := make(chan struct{})
	w := newWorld(t, func(c *Conn) {
		if c.Peer.UID == 65534 {
			c.Admit()
			<-gone
			return
		}
		b := make([]byte, 1)
		if _, err := c.Read(b); err == nil {
			_, _ = c.Write(b)
		}
	})
	w.passLingering(t)
	w.answers(t)
	close(gone)
	nstest.Eventually(t, func() error {
		if n := w.active.Load(); n > 0 {
			return fmt.Errorf("%d connections wait for their end", n)
		}
		return nil
	})
}

// TestHTTPTakesNoDescriptors checks that HTTP accepts no descriptors. Since Linux 6.16 the kernel
// refuses them and the connection continues.
func TestHTTPTakesNoDescriptors(t *testing.T) {
	path := filepath.Join(t.TempDir(), "socket")
	l, err := Unix(path)
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = HTTP(t.Context(), l, http.NotFoundHandler(), Options{}) }() // ends with the test
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	nstest.Eventually(t, func() error { // HTTP has started
		_, _, err = c.(*net.UnixConn).WriteMsgUnix([]byte("G"), unix.UnixRights(0), nil)
		if err == nil {
			_ = c.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
			_, err = c.Read(make([]byte, 1))
		}
		if err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			return errors.New("it takes descriptors")
		}
		return nil
	})
}
