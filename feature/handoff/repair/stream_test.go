// SPDX-License-Identifier: Apache-2.0

package repair

import (
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

type rawConn = syscall.RawConn

// echoer echoes every byte. It can stop between any two bytes.
type echoer struct {
	pending []byte // read but not yet written
}

// run echoes until the deadline (nil) or the end of the stream (io.EOF).
func (e *echoer) run(c net.Conn, until time.Time) error {
	b := make([]byte, 32<<10)
	if err := c.SetDeadline(until); err != nil {
		return err
	}
	for {
		for len(e.pending) > 0 {
			n, err := c.Write(e.pending)
			e.pending = e.pending[n:]
			if errors.Is(err, os.ErrDeadlineExceeded) {
				return nil
			} else if err != nil {
				return err
			}
		}
		n, err := c.Read(b)
		e.pending = append(e.pending[:0:0], b[:n]...)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return nil
		} else if err != nil {
			return err
		}
	}
}

// echoWhileMoving runs an echo service with one session, and moves it between the servers the given number of times.
// It then echoes to the end of the stream.
func (w *world) echoWhileMoving(first *net.TCPConn, every time.Duration, moves int, moved chan<- struct{}) (done int, err error) {
	e := &echoer{}
	var conn net.Conn = first
	var d dumper = fresh{first}
	for {
		until := time.Now().Add(every)
		if done == moves {
			if until = (time.Time{}); moved != nil {
				close(moved)
				moved = nil
			}
		}
		switch err := e.run(conn, until); {
		case errors.Is(err, io.EOF):
			return done, conn.Close()
		case err != nil:
			return done, err
		}
		c := w.move(d)
		conn, d = c, c
		done++
	}
}

// TestStreamWhileMoving moves a session hundreds of times between two servers. A verified stream in both directions
// continues without a reset.
func TestStreamWhileMoving(t *testing.T) {
	for _, tc := range []struct {
		name, network string
		moves         int
	}{{"IPv4", "tcp4", 300}, {"IPv6", "tcp6", 100}, {"IPv4 on IPv6", "tcp", 50}} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t)
			client, server := w.pair(tc.network, buffers(64<<10), buffers(64<<10))
			moves, bytes := w.stream(client, server, 3*time.Millisecond, tc.moves, 2*time.Minute)
			t.Logf("%d moves, %d bytes each way", moves, bytes)
			if moves != tc.moves {
				t.Errorf("%d moves, want %d", moves, tc.moves)
			}
			w.WantNoResets()
		})
	}
}

// buffers gives a socket fixed buffer sizes, for short queues.
func buffers(size int) func(fd int) error {
	return func(fd int) error {
		return errors.Join(setInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, size), setInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, size))
	}
}

// stream makes the client send data and verify its echo until the moves are done. The client then ends its direction,
// and waits for the end of the other.
func (w *world) stream(client, server *net.TCPConn, every time.Duration, moves int, limit time.Duration) (done int, echoed uint64) {
	w.t.Helper()
	_ = client.SetDeadline(time.Now().Add(limit))
	moved := make(chan struct{})
	var sent uint64
	together(func() {
		err := errors.New("a move failed")
		defer func() { // also on Fatal, which only ends this goroutine
			if err != nil {
				w.t.Errorf("service, after %d moves: %v", done, err)
				client.Close()
			}
		}()
		done, err = w.echoWhileMoving(server, every, moves, moved)
	}, func() {
		b := make([]byte, 16<<10)
		for {
			pattern(b, sent)
			n, err := client.Write(b)
			sent += uint64(n)
			if err != nil {
				w.t.Errorf("client's byte %d: %v", sent, err)
				return
			}
			select {
			case <-moved:
				if err := client.CloseWrite(); err != nil {
					w.t.Error(err)
				}
				return
			default:
			}
		}
	}, func() {
		b := make([]byte, 64<<10)
		for {
			n, err := client.Read(b)
			if err2 := verify(b[:n], echoed); err2 != nil {
				w.t.Errorf("echo: %v", err2)
				client.Close()
				return
			}
			echoed += uint64(n)
			if errors.Is(err, io.EOF) {
				return
			} else if err != nil {
				w.t.Errorf("echo, after %d bytes: %v", echoed, err)
				return
			}
		}
	})
	if echoed != sent {
		w.t.Errorf("%d bytes came back of %d", echoed, sent)
	}
	return done, echoed
}
