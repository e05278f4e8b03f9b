// SPDX-License-Identifier: Apache-2.0

package repair

import (
	"io"
	"net"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/nstest"
	"golang.org/x/sys/unix"
)

// stateOf returns the kernel's name of a connection's state.
func stateOf(t testing.TB, c *net.TCPConn) (name string) {
	in(t, c, func(fd int) {
		i, err := tcpInfo(fd)
		if err != nil {
			t.Fatal(err)
		}
		name = stateName(i.State)
	})
	return name
}

// patience is the timeout for events that must happen. It exceeds pauses of the machine, and costs nothing if they
// happen.
const patience = 30 * time.Second

func waitState(t testing.TB, c *net.TCPConn, want string) {
	t.Helper()
	nstest.Until(t, "state "+want, func() bool { return stateOf(t, c) == want })
}

// write writes n bytes and must not block.
func write(t testing.TB, c net.Conn, n int, offset uint64) {
	t.Helper()
	b := make([]byte, n)
	pattern(b, offset)
	_ = c.SetWriteDeadline(time.Now().Add(patience))
	if _, err := c.Write(b); err != nil {
		t.Fatal(err)
	}
}

// wantRest reads the pattern from offset on, to the end of the stream.
func wantRest(t testing.TB, who string, c net.Conn, n int, offset uint64) {
	t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(patience))
	b, err := io.ReadAll(struct{ io.Reader }{c})
	if err != nil {
		t.Fatalf("%s, after %d bytes of %d: %v", who, len(b), n, err)
	}
	if err := verify(b, offset); err != nil || len(b) != n {
		t.Fatalf("%s has %d bytes, want %d: %v", who, len(b), n, err)
	}
}

// ok fails the test on an error.
func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestStatesMove moves a session in every state with an application, and checks its proper end.
func TestStatesMove(t *testing.T) {
	for _, tc := range []struct {
		name, state string
		// before brings the session into the state; after acts as the application at the destination.
		before func(w *world, client, server *net.TCPConn)
		after  func(client *net.TCPConn, server *Conn)
	}{
		{"the peer has ended, unread", "CLOSE_WAIT",
			func(w *world, client, server *net.TCPConn) { write(t, client, 5000, 0); ok(t, client.CloseWrite()) },
			func(client *net.TCPConn, server *Conn) {
				wantRest(t, "service", server, 5000, 0)
				write(t, server, 7000, 0)
				ok(t, server.Close())
				wantRest(t, "client", client, 7000, 0)
			}},
		{"we have ended", "FIN_WAIT2",
			func(w *world, client, server *net.TCPConn) { write(t, server, 3000, 0); ok(t, server.CloseWrite()) },
			func(client *net.TCPConn, server *Conn) {
				write(t, client, 4000, 0)
				ok(t, client.CloseWrite())
				wantRest(t, "service", server, 4000, 0)
				wantRest(t, "client", client, 3000, 0)
			}},
		{"we have ended, unacknowledged", "FIN_WAIT1",
			func(w *world, client, server *net.TCPConn) {
				w.Hold() // blocks acknowledgements
				write(t, server, 3000, 0)
				ok(t, server.CloseWrite())
			},
			func(client *net.TCPConn, server *Conn) {
				wantRest(t, "client", client, 3000, 0)
				write(t, client, 4000, 0)
				ok(t, client.CloseWrite())
				wantRest(t, "service", server, 4000, 0)
			}},
		{"we have ended, unsent", "FIN_WAIT1",
			func(w *world, client, server *net.TCPConn) {
				write(t, server, 300000, 0) // more than the client accepts
				ok(t, server.CloseWrite())
			},
			func(client *net.TCPConn, server *Conn) {
				wantRest(t, "client", client, 300000, 0)
				ok(t, client.Close())
				wantRest(t, "service", server, 0, 0)
			}},
		{"both have ended, ours unacknowledged", "LAST_ACK",
			func(w *world, client, server *net.TCPConn) {
				write(t, client, 100, 0)
				ok(t, client.CloseWrite())
				waitState(t, server, "CLOSE_WAIT")
				w.Hold()
				write(t, server, 3000, 0)
				ok(t, server.CloseWrite())
			},
			func(client *net.TCPConn, server *Conn) {
				wantRest(t, "service", server, 100, 0)
				wantRest(t, "client", client, 3000, 0)
			}},
		{"both have ended at once", "CLOSING",
			func(w *world, client, server *net.TCPConn) {
				// The client's FIN arrives, but its acknowledgement of ours does not: the FIN is older.
				w.Hold()
				ok(t, client.CloseWrite())
				time.Sleep(20 * time.Millisecond)
				ok(t, server.CloseWrite())
				w.Route(w.Owner)
				p := make([]byte, 2048)
				nstest.Until(t, "the client's FIN is held", func() bool {
					n, err := unix.Read(int(w.Held.Fd()), p)
					const fin = 1 // in byte 13 of the TCP header, after 20 bytes of the IPv4 header
					if err != nil || p[0] != 0x45 || p[33]&fin == 0 {
						return false
					}
					_, err = unix.Write(int(w.Held.Fd()), p[:n])
					return err == nil
				})
				w.Hold()
			},
			func(client *net.TCPConn, server *Conn) {
				wantRest(t, "service", server, 0, 0)
				wantRest(t, "client", client, 0, 0)
			}},
		{"reading was shut down", "ESTABLISHED",
			func(w *world, client, server *net.TCPConn) { ok(t, server.CloseRead()) },
			func(client *net.TCPConn, server *Conn) {
				wantRest(t, "service", server, 0, 0)
				write(t, server, 3000, 0)
				ok(t, server.CloseWrite())
				wantRest(t, "client", client, 3000, 0)
			}},
	} {
		for _, hops := range []int{1, 2} {
			t.Run(tc.name+map[int]string{1: "", 2: ", twice"}[hops], func(t *testing.T) {
				w := newWorld(t)
				client, server := w.pair("tcp4", buffers(20000), buffers(400000))
				tc.before(w, client, server)
				waitState(t, server, tc.state)
				c := w.move(fresh{server})
				if hops == 2 {
					c = w.move(c)
				}
				tc.after(client, c)
				w.WantNoResets()
			})
		}
	}
}

// TestLargeQueuesMove moves a session with full queues. No unacknowledged, unsent or unread data is lost.
func TestLargeQueuesMove(t *testing.T) {
	for _, tc := range []struct {
		name         string
		drop, flying bool
	}{{"full", false, false}, {"what was in flight is lost", true, false}, {"acknowledgements are on their way", false, true}, {"acknowledgements are lost", true, true}} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t)
			w.Drop = tc.drop
			client, server := w.pair("tcp4", nil, nil)
			warm(t, client, server)
			// Both write until they block; nobody reads.
			up := fill(t, client, func() bool { return unread(t, server) >= 1<<20 })
			if tc.flying {
				w.Hold()
			}
			down := fill(t, server, func() (large bool) {
				in(t, server, func(fd int) { l, err := queueLengths(fd); large = err == nil && l.unacked >= 1<<20 })
				return large
			})
			var state *State
			c := w.moveState(fresh{server}, func(s *State) { state = s })
			t.Logf("%d bytes unread, %d to be acknowledged, %d of them unsent; receive buffer %d, send buffer %d",
				len(state.Unread), len(state.Send), state.Unsent, state.RcvBuf, state.SndBuf)
			if len(state.Unread) < 1<<20 || len(state.Send) < 1<<20 || state.Unsent == 0 && !tc.flying {
				t.Error("the queues are not large")
			}
			in(t, c.TCPConn, func(fd int) {
				if n, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF); err != nil || n != int(state.SndBuf) {
					t.Errorf("send buffer %d, %v, want %d", n, err, state.SndBuf)
				}
			})
			ok(t, client.CloseWrite())
			ok(t, c.CloseWrite())
			together(func() { wantRest(t, "service", c, up, 0) }, func() { wantRest(t, "client", client, down, 0) })
			w.WantNoResets()
		})
	}
}

// warm makes the buffers of both ends grow.
func warm(t testing.TB, client, server net.Conn) {
	t.Helper()
	together(func() { transmit(t, client, server, 32<<20, 0) }, func() { transmit(t, server, client, 32<<20, 0) })
}

// fill writes the pattern until the write would block and full returns true. The transport may pause in between.
func fill(t testing.TB, c net.Conn, full func() bool) (n int) {
	t.Helper()
	b := make([]byte, 64<<10)
	for end := time.Now().Add(patience); ; {
		pattern(b, uint64(n))
		_ = c.SetWriteDeadline(time.Now().Add(300 * time.Millisecond))
		m, err := c.Write(b)
		n += m
		if err != nil && (full() || time.Now().After(end)) {
			return n
		}
	}
}

// TestLossWhileMoving checks that packet loss during a move only costs time.
func TestLossWhileMoving(t *testing.T) {
	w := newWorld(t)
	w.Drop = true
	client, server := w.pair("tcp4", buffers(64<<10), buffers(64<<10))
	moves, bytes := w.stream(client, server, 20*time.Millisecond, 15, 2*time.Minute)
	t.Logf("%d moves, %d bytes each way, %d segments sent again by the servers, %d by the client", moves, bytes,
		w.Counter(w.Servers[0], "RetransSegs")+w.Counter(w.Servers[1], "RetransSegs"), w.Counter(w.Client, "RetransSegs"))
	w.WantNoResets()
}
