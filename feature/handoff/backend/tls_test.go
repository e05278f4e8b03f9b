// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/repair"
	"github.com/weir-project/weir/feature/handoff/repair/ktlstest"
	"github.com/weir-project/weir/feature/handoff/sock"
	"github.com/weir-project/weir/feature/handoff/wire"
	"github.com/weir-project/weir/internal/nstest"
)

// needKTLS skips the test on kernels without complete kTLS.
func needKTLS(t *testing.T) {
	t.Helper()
	for _, n := range repair.Needs() {
		if n.Name == "kTLS" && n.Check() != nil {
			t.Skip("need: kernel with kTLS:", n.Check())
		}
	}
}

func inside(t testing.TB, c *net.TCPConn, f func(fd int)) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) { f(int(fd)) })
	}
	if err != nil {
		t.Fatal(err)
	}
}

// bare is a member using the bare protocol, because the clients do not support kTLS sessions. It commits the kernel's
// positions once all data is read and acknowledged.
type bare struct {
	t *testing.T
	s *server
	*wire.Conn
	seq uint32
}

func (s *server) serveBare(t *testing.T) *bare {
	t.Helper()
	c, err := wire.Dial(t.Context(), s.keeper)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	b := &bare{t: t, s: s, Conn: c}
	b.call(wire.Message{Type: wire.Hello, Text: service, Name: "0"}, wire.Welcome)
	b.call(wire.Message{Type: wire.Ready, Number: 1}, wire.OK)
	return b
}

// call sends a request and waits for the wanted answer. Keepers learn of other backends shortly after their agents.
func (b *bare) call(m wire.Message, want wire.Type, fds ...int) {
	b.t.Helper()
	nstest.Within(b.t, longest, func() error {
		b.seq++
		m.Seq = b.seq
		if err := b.Send(&m, fds...); err != nil {
			b.t.Fatal(err)
		}
		got, _ := b.hear()
		if got.Type == want {
			return nil
		}
		err := fmt.Errorf("server %d: %#x is answered with %#x (%s)", b.s.number, m.Type, got.Type, got.Text)
		if got.Type != wire.Error || wire.Code(got.Number) != wire.NoPeer {
			b.t.Fatal(err)
		}
		return err
	})
}

func (b *bare) hear() (wire.Message, []int) {
	b.t.Helper()
	if err := b.SetReadDeadline(time.Now().Add(longest)); err != nil {
		b.t.Fatal(err)
	}
	m, fds, err := b.Receive()
	if err != nil {
		b.t.Fatalf("server %d: %v", b.s.number, err)
	}
	return m, fds
}

// held is a session of a bare member.
type held struct {
	id uint64
	c  *net.TCPConn
}

// message returns a message with the session's current positions.
func (h held) message(t testing.TB, kind wire.Type) (m wire.Message) {
	t.Helper()
	inside(t, h.c, func(fd int) {
		at, err := sock.ReadPositions(fd)
		if err != nil {
			t.Fatal(err)
		}
		m = wire.Message{Type: kind, Session: h.id, Read: at.Read, Written: at.Written, State: []byte("of the member")}
	})
	return m
}

// accept accepts the client's connection, gives its keys to the kernel, and keeps the session.
func (b *bare) accept(l net.Listener, client net.Conn, s ktlstest.Suite) (h held, near *tls.Conn) {
	t := b.t
	t.Helper()
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	for _, c := range []net.Conn{c, client} {
		if err := c.SetDeadline(time.Now().Add(10 * longest)); err != nil {
			t.Fatal(err)
		}
	}
	near, far := ktlstest.Handshake(t, client, c, s)
	h.c = c.(*net.TCPConn)
	inside(t, h.c, func(fd int) {
		if h.id, err = sock.Cookie(fd); err == nil {
			err = far.Keys.Give(fd)
		}
	})
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EINVAL) {
		t.Skipf("need: kernel with cipher %d: %v", far.Keys.Cipher, err)
	} else if err != nil {
		t.Fatal(err)
	}
	m := h.message(t, wire.Keep)
	m.Number = uint32(wire.Stream)
	inside(t, h.c, func(fd int) { b.call(m, wire.OK, fd) })
	return h, near
}

// take receives a session.
func (b *bare) take() (h held) {
	t := b.t
	t.Helper()
	m, fds := b.hear()
	if m.Type != wire.Give || len(fds) != 1 {
		t.Fatalf("server %d hears %#x (%s)", b.s.number, m.Type, m.Text)
	}
	f := os.NewFile(uintptr(fds[0]), "session")
	defer f.Close()
	if at, err := sock.ReadPositions(fds[0]); err != nil || at.Read != m.Read || len(m.Unread) != 0 || string(m.State) != "of the member" {
		t.Errorf("server %d: given at %d, %d bytes beside it, state %q; the kernel says %+v, %v", b.s.number, m.Read, len(m.Unread), m.State, at, err)
	}
	c, err := net.FileConn(f)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(10 * longest)); err != nil {
		t.Fatal(err)
	}
	if err := b.Send(&wire.Message{Type: wire.Accept, Session: m.Session}); err != nil {
		t.Fatal(err)
	}
	return held{m.Session, c.(*net.TCPConn)}
}

// quiet waits until the peer has acknowledged everything.
func (h held) quiet(w *world) {
	w.t.Helper()
	w.eventually("the client has all", func() bool {
		left := -1
		inside(w.t, h.c, func(fd int) { left, _ = unix.IoctlGetInt(fd, unix.SIOCOUTQ) })
		return left == 0
	})
}

// TestTLSMovesBetweenServers moves a kTLS session back and forth between two backends, with every byte verified.
func TestTLSMovesBetweenServers(t *testing.T) {
	needKTLS(t)
	w := newNetwork(t, 2, at4)
	w.bare = true
	w.run()
	members := []*bare{w.servers[0].serveBare(t), w.servers[1].serveBare(t)}
	var l net.Listener
	w.in(w.servers[0].ns, func() (err error) {
		lc := net.ListenConfig{}
		lc.SetMultipathTCP(false)
		l, err = lc.Listen(t.Context(), "tcp", at4.String())
		return err
	})
	defer l.Close()
	for _, s := range ktlstest.Suites[:2] {
		t.Run(s.Name, func(t *testing.T) {
			c := w.dial()
			members[0].t, members[1].t = t, t
			h, near := members[0].accept(l, c.Conn, s)
			var said uint64
			talk := func(n int) {
				t.Helper()
				for way, ends := range [][2]net.Conn{{near, h.c}, {h.c, near}} {
					want := bytes.Repeat([]byte{byte(n + way)}, n)
					answer(want, said)
					sent := make(chan error, 1)
					go func() { _, err := ends[0].Write(want); sent <- err }()
					got := make([]byte, n)
					_, err := io.ReadFull(ends[1], got)
					if err = errors.Join(err, <-sent); err != nil || !bytes.Equal(got, want) {
						t.Fatalf("way %d, after %d bytes: %v", way, said, err)
					}
				}
				said += uint64(n)
			}
			talk(100)
			for hop := range 6 {
				here, there := members[hop%2], members[1-hop%2]
				h.quiet(w)
				w.eventually("the move before is over", func() bool {
					st, err := here.s.agent.Status()
					return err == nil && st.Sending+st.Receiving == 0
				})
				m := h.message(t, wire.Transfer)
				m.Name = fmt.Sprint("@s", there.s.number)
				here.call(m, wire.OK)
				h.c.Close()
				h = there.take()
				talk(1 + hop*7919)
			}
			st, err := w.servers[0].agent.Status()
			if err != nil || len(st.Rejected) != 0 || st.Returned != 0 {
				t.Errorf("%+v, %v", st, err)
			}
		})
	}
}
