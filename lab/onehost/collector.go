// SPDX-License-Identifier: Apache-2.0

package onehost

import (
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/weir-project/weir/clients/go/handoff"
)

// The signals of a collector.
const (
	moveSignal = syscall.SIGUSR1 // move every session to the other collector, at the end of a message
	showSignal = syscall.SIGUSR2 // write the books of every session
)

// collector is a BMP collector. It keeps its state by session.
type collector struct {
	out string // file of its books
	to  string // target of its moves

	mu       sync.Mutex
	books    map[any]*book
	sessions map[*handoff.Session]bool
	leave    time.Time // deadline to move the session; zero: no order
}

// An order is a request to move the session; its server checks for orders between messages. The session
// moves with the beginning of a message, unless none arrives for a while. The order may arrive before the
// session, and waits for it. The session's previous server here may detect the move late.
const (
	orderTime = 200 * time.Millisecond
	morsel    = 40 // bytes: less than any message except an Initiation
)

func newCollector(out, to string) *collector {
	c := &collector{out: out, to: to, books: map[any]*book{}, sessions: map[*handoff.Session]bool{}}
	onSignal(showSignal, func() {
		if err := c.show(); err != nil {
			fmt.Fprintln(os.Stderr, "ERROR:", err)
		}
	})
	return c
}

// shown is a collector's output on request.
type shown struct{ Books []*book }

func (c *collector) show() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	var s shown
	for _, b := range c.books {
		s.Books = append(s.Books, b)
	}
	f, err := os.Create(c.out + ".new")
	if err != nil {
		return err
	}
	err = errors.Join(gob.NewEncoder(f).Encode(s), f.Close())
	if err == nil {
		err = os.Rename(c.out+".new", c.out)
	}
	return err
}

// journal appends a line to the common file of a service's processes. It survives their kills.
func journal(path, format string, a ...any) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o644)
	if err == nil {
		_, err = fmt.Fprintf(f, format+"\n", a...)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "ERROR:", err)
	}
}

// playBMP runs a member: KEEPER SERVICE NAME ADDRESS BOOKS JOURNAL TO.
func playBMP(args []string) error {
	if len(args) != 7 {
		return fmt.Errorf("%d arguments, want 7", len(args))
	}
	c := newCollector(args[4], args[6])
	l, err := handoff.Listen(context.Background(), "tcp", args[3], handoff.Options{Keeper: args[0], Service: args[1], Name: args[2],
		Log: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	if err != nil {
		return err
	}
	onSignal(moveSignal, c.order)
	fmt.Print(sayReady)
	for {
		s, err := l.AcceptSession()
		if err != nil {
			return err
		}
		go func() {
			if err := c.serve(l, s, args[5]); err != nil && !errors.Is(err, handoff.ErrMoved) {
				journal(args[5], "broken %d at %s: %v", s.ID(), args[2], err)
				s.Close()
			}
		}()
	}
}

// order moves the session, as soon as its server is between two messages.
func (c *collector) order() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.leave = time.Now().Add(orderTime)
	for s := range c.sessions {
		s.SetReadDeadline(time.Unix(1, 0)) // wakes a reader waiting for the next message
	}
}

// expiry returns the deadline of an order, and clears it.
func (c *collector) expiry() (until time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	until, c.leave = c.leave, time.Time{}
	return until
}

// giveBack restores an order read by a server without the session.
func (c *collector) giveBack(until time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.leave.IsZero() {
		c.leave = until
	}
	for s := range c.sessions {
		s.SetReadDeadline(time.Unix(1, 0))
	}
}

// serve reads one session to its end, or until it moves.
func (c *collector) serve(l *handoff.Listener, s *handoff.Session, log string) error {
	b, err := restore(s.State())
	if err != nil {
		return fmt.Errorf("the state: %w", err)
	}
	read, _ := s.Positions()
	switch {
	case !s.Received():
		journal(log, "new %d from %s", s.ID(), s.RemoteAddr())
	case read != b.Bytes:
		return fmt.Errorf("%w: the session is at byte %d, its book at %d", errBroken, read, b.Bytes)
	default:
		b.Moves++
		if s.Crashed() {
			b.Crashes++
		}
		if err := c.commit(s, b, nil); err != nil {
			return err
		}
	}
	c.mu.Lock()
	c.books[s], c.sessions[s] = b, true
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.books, s)
		delete(c.sessions, s)
	}()
	return c.read(l, s, b)
}

func (c *collector) read(l *handoff.Listener, s *handoff.Session, b *book) (err error) {
	var partial []byte
	var leave time.Time // deadline to move the session; zero: no order
	defer func() {
		if !leave.IsZero() && errors.Is(err, handoff.ErrMoved) {
			c.giveBack(leave)
		}
	}()
	all := make([]byte, 64<<10)
	for {
		if t := c.expiry(); !t.IsZero() {
			leave = t
			s.SetReadDeadline(t)
		}
		buf := all
		if !leave.IsZero() {
			buf = all[:morsel]
			if len(partial) > 0 || time.Now().After(leave) {
				err := c.transfer(l, s, b, partial)
				if err == nil {
					leave = time.Time{}
				}
				if err == nil || errors.Is(err, handoff.ErrMoved) {
					return err
				}
				leave = time.Now().Add(orderTime) // the other collector is not ready
				s.SetReadDeadline(leave)
			}
		}
		n, err := s.Read(buf)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			continue
		}
		if err != nil {
			return err
		}
		if partial, err = c.feed(b, append(partial, buf[:n]...)); err != nil {
			return err
		}
		if err := c.commit(s, b, partial); err != nil {
			return err
		}
	}
}

// feed enters the read bytes and returns the incomplete rest of a message.
func (c *collector) feed(b *book, in []byte) (partial []byte, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	rest, err := b.add(in)
	return append([]byte(nil), in[len(in)-rest:]...), err
}

func (c *collector) commit(s *handoff.Session, b *book, partial []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	state, err := b.state()
	if err == nil {
		err = s.CommitExcept(len(partial), state)
	}
	return err
}

// transfer moves a session at the end of a message, with the beginning of the next.
func (c *collector) transfer(l *handoff.Listener, s *handoff.Session, b *book, partial []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(partial) > 0 {
		b.Partial++
	}
	state, err := b.state()
	if err != nil {
		return err
	}
	return l.Member().TransferExcept(s, c.to, len(partial), state)
}

// playPlain runs an ordinary collector: ADDRESS BOOKS JOURNAL. Its sessions and its books die with it.
func playPlain(args []string) error {
	if len(args) != 3 {
		return fmt.Errorf("%d arguments, want 3", len(args))
	}
	c := newCollector(args[1], "")
	lc := net.ListenConfig{}
	lc.SetMultipathTCP(false)
	l, err := lc.Listen(context.Background(), "tcp", args[0])
	if err != nil {
		return err
	}
	fmt.Print(sayReady)
	for {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		go c.serveOnce(conn, args[2])
	}
}

func (c *collector) serveOnce(conn net.Conn, log string) {
	journal(log, "new from %s", conn.RemoteAddr())
	b := newBook()
	c.mu.Lock()
	c.books[conn] = b
	c.mu.Unlock()
	var partial []byte
	buf := make([]byte, 64<<10)
	for {
		n, err := conn.Read(buf)
		if err == nil {
			partial, err = c.feed(b, append(partial, buf[:n]...))
		}
		if err != nil {
			if !errors.Is(err, io.EOF) {
				journal(log, "broken: %v", err)
			}
			c.mu.Lock()
			delete(c.books, conn)
			c.mu.Unlock()
			conn.Close()
			return
		}
	}
}
