// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"io"
	"net"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/handoff/sock"
	"github.com/weir-project/weir/feature/handoff/wire"
)

// odd is a member using the bare protocol.
type odd struct {
	t    *testing.T
	conn *wire.Conn
	name string
}

func (s *server) odd(t *testing.T, name string, capabilities uint32) *odd {
	t.Helper()
	c, err := wire.Dial(t.Context(), s.keeper)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	o := &odd{t, c, name}
	o.say(&wire.Message{Type: wire.Hello, Seq: 1, Name: name, Text: service, Number: capabilities})
	o.say(&wire.Message{Type: wire.Ready, Seq: 2, Number: 1})
	return o
}

// say sends a message, and waits for the answer if it has one.
func (o *odd) say(m *wire.Message, fds ...int) {
	o.t.Helper()
	if err := o.conn.Send(m, fds...); err != nil {
		o.t.Fatal(err)
	}
	for m.Seq != 0 {
		answer, fds, err := o.conn.Receive()
		wire.CloseAll(fds)
		if err != nil {
			o.t.Fatal(err)
		}
		if answer.Seq == m.Seq {
			if err := answer.Err(); err != nil {
				o.t.Fatal(err)
			}
			return
		}
	}
}

// has gives the keeper a connection as the member's. The peer has sent a byte.
func (o *odd) has(l net.Listener) (c *net.TCPConn, id uint64) {
	o.t.Helper()
	peer, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		o.t.Fatal(err)
	}
	o.t.Cleanup(func() { peer.Close() })
	ours, err := l.Accept()
	if err != nil {
		o.t.Fatal(err)
	}
	o.t.Cleanup(func() { ours.Close() })
	c = ours.(*net.TCPConn)
	raw, err := c.SyscallConn()
	if err != nil {
		o.t.Fatal(err)
	}
	cerr := raw.Control(func(fd uintptr) {
		sock.Inline(int(fd))
		if id, err = sock.Cookie(int(fd)); err == nil {
			o.say(&wire.Message{Type: wire.Keep, Seq: 3, Session: id, Number: uint32(wire.Stream)}, int(fd))
		}
	})
	if err != nil || cerr != nil {
		o.t.Fatal(err, cerr)
	}
	if _, err := peer.Write([]byte("x")); err != nil {
		o.t.Fatal(err)
	}
	return c, id
}

// TestDrainNames checks that a drain lists the blocking sessions with reasons. They do not block other sessions,
// however many they are.
func TestDrainNames(t *testing.T) {
	w := newWorld(t, 2, at4)
	s := w.servers[0]
	lc := net.ListenConfig{}
	lc.SetMultipathTCP(false)
	l, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	deaf := s.odd(t, "deaf", wire.Exact|wire.Moves)
	want := map[string]string{} // by client
	var c *net.TCPConn
	for range 2 * drainAtOnce {
		c, _ = deaf.has(l)
		want[c.RemoteAddr().String()] = "has not released it"
	}
	c, _ = s.odd(t, "still", wire.Exact).has(l)
	want[c.RemoteAddr().String()] = "does not move sessions on request"
	eater := s.odd(t, "eater", wire.Exact|wire.Moves)
	c, id := eater.has(l)
	want[c.RemoteAddr().String()] = "1 bytes were read and not committed"
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	go func() { // a member without commits
		for {
			m, fds, err := eater.conn.Receive()
			wire.CloseAll(fds)
			if err != nil {
				return
			}
			if m.Type == wire.Move {
				_ = eater.conn.Send(&wire.Message{Type: wire.Transfer, Seq: 4, Session: id, Name: m.Name})
			}
		}
	}()
	moves := w.dial()
	if err := moves.ask("hello"); err != nil {
		t.Fatal(err)
	}
	named := func(all []Blocked) bool {
		found := 0
		for _, b := range all {
			if b.Service == service && b.Address == l.Addr().String() && b.PID != 0 && b.Member != "" && want[b.Client] != "" && strings.Contains(b.Reason, want[b.Client]) {
				found++
			}
		}
		return found == len(want)
	}
	w.eventually("all are named, and the other session has moved", func() bool {
		d, err := s.agent.drainStep(t.Context())
		return err == nil && named(d.Blocked) && w.has(moves) == 2
	})
	if st, err := s.agent.Status(); err != nil || !named(st.Blocked) {
		t.Errorf("%+v, %v", st.Blocked, err)
	}
	if err := moves.ask("and goes on"); err != nil {
		t.Error(err)
	}
}
