// SPDX-License-Identifier: Apache-2.0

package delay

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/handoff/repair"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/lab/topo"
)

// A session with a client at the far end of a line moves repeatedly. With delay and loss, too, every byte
// returns once, and neither side sends a reset.
func TestSessionsMove(t *testing.T) {
	for _, tc := range []struct {
		name string
		line Line
		drop bool
	}{
		{"40 ms, 1 % loss", Line{Delay: 20 * time.Millisecond, Loss: .01}, false},
		{"40 ms, 1 % loss, reordering, 100 Mbit/s", Line{Delay: 20 * time.Millisecond, Loss: .01, Reorder: .01, Rate: 100e6}, false},
		{"40 ms, 1 % loss, with packets lost during the move", Line{Delay: 20 * time.Millisecond, Loss: .01}, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m := &moving{t: t}
			env := newEnds(t, 5).env
			var line *Delay
			m.Movable = nstest.NewMovable(t, func(router, client *netns.Handle, routerDevice, clientDevice string, routerAddrs, clientAddrs []netip.Prefix) {
				var err error
				line, err = New(env, topo.End{NS: router, Name: routerDevice, Addrs: routerAddrs}, topo.End{NS: client, Name: clientDevice, Addrs: clientAddrs}, tc.line)
				if err != nil {
					t.Fatal(err)
				}
			})
			m.Drop = tc.drop
			const moves = 40
			bytes := m.run(moves, 30*time.Millisecond)
			m.WantNoResets()
			down, up, err := line.Stats()
			if err != nil {
				t.Fatal(err)
			}
			slices.Sort(m.took)
			t.Logf("%d moves, %d bytes each way, %d packets held; a move p50 %v, max %v; lost %d of %d down, %d of %d up; line late by p99 %v",
				moves, bytes, m.held, m.took[len(m.took)/2], m.took[len(m.took)-1], down.Lost, down.Packets, up.Lost, up.Packets, max(down.LatenessP99, up.LatenessP99))
			if down.Lost+up.Lost == 0 {
				t.Error("the line lost nothing")
			}
		})
	}
}

// moving is an echo service on the session's current server.
type moving struct {
	*nstest.Movable
	t    testing.TB
	took []time.Duration
	held int
}

func (m *moving) do(h *netns.Handle, f func() error) {
	m.t.Helper()
	if err := h.Do(f); err != nil {
		m.t.Fatal(err)
	}
}

// run moves the session moves times, while the client sends and verifies.
func (m *moving) run(moves int, every time.Duration) (echoed int) {
	m.t.Helper()
	client, server := m.connect()
	_ = client.SetDeadline(time.Now().Add(6 * time.Minute))
	moved := make(chan struct{})
	sent := 0
	var wg sync.WaitGroup
	wg.Go(func() {
		err := errors.New("a move failed")
		defer func() { // also for a Fatal; it ends this goroutine only
			if err != nil {
				m.t.Errorf("service, after %d moves: %v", len(m.took), err)
				client.Close()
			}
		}()
		err = m.serve(server, moves, every, moved)
	})
	wg.Go(func() {
		for b := make([]byte, 4<<10); ; {
			stream(b, sent)
			n, err := client.Write(b)
			if sent += n; err != nil {
				m.t.Errorf("client's byte %d: %v", sent, err)
				return
			}
			select {
			case <-moved:
				_ = client.CloseWrite()
				return
			default:
			}
		}
	})
	wg.Go(func() {
		b, want := make([]byte, 64<<10), make([]byte, 64<<10)
		for {
			n, err := client.Read(b)
			if stream(want[:n], echoed); !slices.Equal(b[:n], want[:n]) {
				m.t.Errorf("the echo differs in the %d bytes after %d", n, echoed)
				client.Close()
				return
			}
			if echoed += n; errors.Is(err, io.EOF) {
				return
			} else if err != nil {
				m.t.Errorf("echo, after %d bytes: %v", echoed, err)
				return
			}
		}
	})
	wg.Wait()
	if echoed != sent {
		m.t.Errorf("%d bytes returned of %d", echoed, sent)
	}
	return echoed
}

// stream fills b with a pattern changed by any shift.
func stream(b []byte, at int) {
	for i := range b {
		b[i] = byte(uint64(at+i) * 0x9e3779b97f4a7c15 >> 56)
	}
}

func (m *moving) connect() (client, server *net.TCPConn) {
	m.t.Helper()
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	var ln net.Listener
	addr := netip.AddrPortFrom(m.V4, 9000)
	m.do(m.Servers[m.Owner], func() (err error) {
		ln, err = lc.Listen(m.t.Context(), "tcp4", addr.String())
		return err
	})
	defer ln.Close()
	m.do(m.Client, func() (err error) {
		client, err = net.DialTCP("tcp4", nil, net.TCPAddrFromAddrPort(addr))
		return err
	})
	c, err := ln.Accept()
	if err != nil {
		m.t.Fatal(err)
	}
	m.t.Cleanup(func() { client.Close(); c.Close() })
	// Short queues, to spread the bytes of a minute's test over many moves.
	server = c.(*net.TCPConn)
	_ = server.SetReadBuffer(256 << 10)
	_ = server.SetWriteBuffer(256 << 10)
	return client, server
}

// serve echoes, and moves the session in between.
func (m *moving) serve(first *net.TCPConn, moves int, every time.Duration, moved chan struct{}) error {
	var conn net.Conn = first
	dump := func(o repair.DumpOptions) (*repair.State, error) { return repair.DumpConn(first, o) }
	var pending []byte
	for n := 0; ; n++ {
		until := time.Now().Add(every)
		if n == moves {
			until = time.Now().Add(4 * time.Minute)
			close(moved)
		}
		err := echo(conn, &pending, until)
		if errors.Is(err, io.EOF) {
			return conn.Close()
		} else if err != nil || n == moves {
			return err
		}
		begin := time.Now()
		s, err := dump(repair.DumpOptions{Stop: func(repair.Flow) (func(), error) {
			m.Hold()
			m.Disown(m.Owner)
			return nil, nil // a failed dump ends the test
		}})
		if err != nil {
			return err
		}
		if err := conn.Close(); err != nil {
			return err
		}
		next, err := m.restore(s)
		if err != nil {
			return err
		}
		m.took = append(m.took, time.Since(begin))
		conn, dump = next, next.Dump
	}
}

func (m *moving) restore(s *repair.State) (c *repair.Conn, err error) {
	b, err := s.MarshalBinary()
	if err != nil {
		return nil, err
	}
	if s, err = repair.Parse(b); err != nil {
		return nil, err
	}
	m.Own(1 - m.Owner)
	m.do(m.Servers[m.Owner], func() error {
		built, err := repair.Build(s, repair.RestoreOptions{Probe: m.Drop})
		if err == nil {
			c, err = built.Start()
		}
		return err
	})
	m.Route(m.Owner)
	m.held += m.Release()
	return c, err
}

// echo returns received bytes until then.
func echo(c net.Conn, pending *[]byte, until time.Time) error {
	if err := c.SetDeadline(until); err != nil {
		return err
	}
	for b := make([]byte, 32<<10); ; {
		for len(*pending) > 0 {
			n, err := c.Write(*pending)
			*pending = (*pending)[n:]
			if errors.Is(err, os.ErrDeadlineExceeded) {
				return nil
			} else if err != nil {
				return err
			}
		}
		n, err := c.Read(b)
		*pending = append((*pending)[:0:0], b[:n]...)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return nil
		} else if err != nil {
			return err
		}
	}
}
