// SPDX-License-Identifier: Apache-2.0

package handoff_test

import (
	"fmt"
	"net"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/feature/handoff/keeper"
	"github.com/weir-project/weir/feature/handoff/wire"
	"github.com/weir-project/weir/internal/nstest"
)

// dying is a keeper that ends at the worst moment of a transfer: it has given the session away but
// has not reported it.
type dying struct {
	t     testing.TB
	mu    sync.Mutex
	mates map[string]*wire.Conn
	fd    int // the session's descriptor
	label string
	asked chan wire.Message // transfer requests
	took  chan struct{}
	l     *net.UnixListener
	all   sync.WaitGroup
}

// dies starts such a keeper.
func (w *world) dies() *dying {
	w.t.Helper()
	l, err := keeper.Listen(w.socket)
	if err != nil {
		w.t.Fatal(err)
	}
	d := &dying{t: w.t, mates: map[string]*wire.Conn{}, fd: -1, asked: make(chan wire.Message, 1), took: make(chan struct{}, 1), l: l}
	d.all.Go(func() {
		for {
			u, err := l.AcceptUnix()
			if err != nil {
				return
			}
			c, err := wire.NewConn(u)
			if err != nil {
				d.t.Error(err)
				return
			}
			d.all.Go(func() { d.serve(c) })
		}
	})
	return d
}

// end ends the keeper. With mu held, its connections keep their unread data.
func (d *dying) end() {
	d.l.Close()
	unix.Close(d.fd)
	for _, c := range d.mates {
		c.Close()
	}
}

func (d *dying) serve(c *wire.Conn) {
	for {
		m, fds, err := c.Receive()
		if err != nil {
			return
		}
		answer := wire.Message{Type: wire.OK, Seq: m.Seq, Session: m.Session}
		d.mu.Lock()
		switch {
		case m.Type == wire.Hello:
			d.mates[m.Name] = c
			answer.Type, answer.Read, answer.Written = wire.Welcome, 1<<20, 100
		case m.Type == wire.Find:
			answer.Type, answer.Number = wire.Error, uint32(wire.NotFound)
		case m.Type == wire.Keep && wire.Kind(m.Number) == wire.Stream:
			d.fd, d.label, fds = fds[0], m.Text, nil
		case m.Type == wire.Transfer:
			m.State, m.Unread = append([]byte(nil), m.State...), append([]byte(nil), m.Unread...)
			d.asked <- m
			answer.Seq = 0
		case m.Type == wire.Accept:
			d.took <- struct{}{}
		}
		d.mu.Unlock()
		wire.CloseAll(fds)
		if answer.Seq != 0 {
			if err := c.Send(&answer); err != nil {
				d.t.Error(err)
			}
		}
	}
}

// TestGivenAndKeeperGone stops a member that got a session from a keeper about to end, before or
// after it has seen the session. The stop is longer than all timeouts. Exactly one process serves
// the session at any time.
func TestGivenAndKeeperGone(t *testing.T) {
	t.Run("before it is seen", func(t *testing.T) { testGivenAndKeeperGone(t, false) })
	t.Run("after", func(t *testing.T) { testGivenAndKeeperGone(t, true) })
}

func testGivenAndKeeperGone(t *testing.T, seen bool) {
	nstest.NeedRoot(t)
	w := &world{t: t, socket: filepath.Join(t.TempDir(), "keeper.sock"), address: freeAddress(t)}
	d := w.dies()
	a := w.member("a", 0)
	c := w.client()
	c.run()
	b := w.memberAt(freeAddress(t), "b", 0)
	nstest.Until(t, "the session is kept", func() bool { d.mu.Lock(); defer d.mu.Unlock(); return d.fd >= 0 && d.mates["b"] != nil })
	time.Sleep(50 * time.Millisecond)
	a.Tell("move b")
	m := <-d.asked
	if !seen {
		stop(t, b)
	}
	d.mu.Lock()
	give := wire.Message{Type: wire.Give, Session: m.Session, Read: m.Read, Written: m.Written, Number: uint32(wire.Stream), Name: "a", Text: d.label, State: m.State, Unread: m.Unread}
	err := d.mates["b"].Send(&give, d.fd)
	d.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	has := a
	if seen {
		<-d.took
		time.Sleep(50 * time.Millisecond) // it serves
		stop(t, b)
		has = b
	}
	d.mu.Lock()
	d.end()
	d.mu.Unlock()
	d.all.Wait()
	nstest.StartReady(t, nstest.Child("keeper", w.socket))
	owner := func() int {
		r, err := handoff.Status(t.Context(), w.socket)
		if err != nil || len(r.Services) != 1 {
			return 0
		}
		for _, s := range r.Services[0].Sessions {
			if s.Kind == "session" {
				return s.PID
			}
		}
		return 0
	}
	if seen {
		time.Sleep(2500 * time.Millisecond) // longer than the previous owner waits to take it back
	} else {
		nstest.Until(t, "the session is again with whom it came from", func() bool { return owner() == a.PID() })
	}
	if err := syscall.Kill(b.PID(), syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	nstest.Until(t, "the session is kept again", func() bool { return owner() == has.PID() })
	nstest.Steadily(t, 500*time.Millisecond, func() error { // long enough to detect two owners
		if at := owner(); at != has.PID() {
			return fmt.Errorf("the session is with process %d, and was with %d", at, has.PID())
		}
		return nil
	})
	c.finish()
}
