// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/feature/handoff/lb"
)

// talk answers each byte by a byte that depends on its stream position. The client thereby detects every lost,
// repeated or changed byte, in both directions. talk's state is the position.
func talk(s *handoff.Session) error {
	var at uint64
	if b := s.State(); len(b) == 8 {
		at = binary.BigEndian.Uint64(b)
	}
	b := make([]byte, 32<<10)
	for {
		n, err := s.Read(b)
		if err == io.EOF {
			return s.Close()
		}
		if err != nil {
			return err
		}
		answer(b[:n], at)
		if _, err := s.Write(b[:n]); err != nil {
			return err
		}
		at += uint64(n)
		if err := s.Commit(binary.BigEndian.AppendUint64(nil, at)); err != nil {
			return err
		}
	}
}

func answer(b []byte, at uint64) {
	for i := range b {
		b[i] ^= byte((at + uint64(i)) * 0x9e3779b97f4a7c15 >> 56)
	}
}

// client is a stream with verified answers.
type client struct {
	net.Conn
	key      lb.Key
	heard    uint64
	seed     uint64
	urgent   bool // the last byte of each message is urgent
	said     chan []byte
	end      chan struct{}
	finished chan error
}

func (w *world) dial() *client {
	w.t.Helper()
	c := &client{said: make(chan []byte, 1024), end: make(chan struct{}), finished: make(chan error, 1)}
	w.in(w.client, func() (err error) {
		c.Conn, err = net.DialTimeout("tcp", w.at.String(), longest)
		return err
	})
	w.t.Cleanup(func() { c.Close() })
	a := c.LocalAddr().(*net.TCPAddr).AddrPort()
	c.key = lb.Key{Client: netip.AddrPortFrom(a.Addr().Unmap(), a.Port())}
	return c
}

// stream talks until stopped, with a pause between messages, and verifies every byte.
func (c *client) stream(size int, pause time.Duration) {
	go func() {
		defer close(c.said)
		r := rand.New(rand.NewPCG(c.seed, 1))
		for {
			select {
			case <-c.end:
				return
			default:
			}
			b := make([]byte, 1+r.IntN(size))
			for i := range b {
				b[i] = byte(r.Uint32())
			}
			if err := c.put(b); err != nil {
				return
			}
			c.said <- b
			time.Sleep(pause)
		}
	}()
	go func() { c.finished <- c.verify() }()
}

// put sends b. Its last byte may be urgent.
func (c *client) put(b []byte) error {
	if !c.urgent {
		_, err := c.Write(b)
		return err
	}
	raw, err := c.Conn.(*net.TCPConn).SyscallConn()
	if err != nil {
		return err
	}
	var serr error
	err = raw.Write(func(fd uintptr) bool {
		for left := b; len(left) > 0 && serr == nil; {
			var n int
			if n, serr = unix.SendmsgN(int(fd), left, nil, nil, unix.MSG_OOB|unix.MSG_NOSIGNAL); serr == unix.EAGAIN {
				b, serr = left, nil
				return false
			}
			left = left[max(n, 0):]
		}
		return true
	})
	return errors.Join(err, serr)
}

func (c *client) verify() error {
	for want := range c.said {
		got := make([]byte, len(want))
		if err := c.SetReadDeadline(time.Now().Add(longest)); err != nil {
			return err
		}
		if _, err := io.ReadFull(c, got); err != nil {
			return fmt.Errorf("after %d bytes: %w", c.heard, err)
		}
		answer(want, c.heard)
		if !bytes.Equal(got, want) {
			return fmt.Errorf("other bytes after %d", c.heard)
		}
		c.heard += uint64(len(want))
	}
	return nil
}

func (c *client) stop() error {
	close(c.end)
	return <-c.finished
}

// ask sends a text, and verifies the answer.
func (c *client) ask(word string) error {
	if _, err := c.Write([]byte(word)); err != nil {
		return err
	}
	c.said = make(chan []byte, 1)
	c.said <- []byte(word)
	close(c.said)
	return c.verify()
}

// send makes the session's member move it to another backend.
func (w *world) send(c *client, to int) error {
	for _, s := range w.servers {
		for _, session := range s.member.Member().Sessions() {
			if session.RemoteAddr().String() == c.LocalAddr().String() {
				return s.member.Member().TransferCommitted(session, fmt.Sprint("@s", to))
			}
		}
	}
	return errors.New("nobody has the session")
}

// mustSend is send. It waits until the other backend's member has the session.
func (w *world) mustSend(c *client, to int) {
	w.t.Helper()
	back := w.back()
	w.ask(c, to)
	w.eventually(fmt.Sprint("the session is at server ", to), func() bool {
		// Initially an agent rejects sessions, until it knows its member.
		if now := w.back(); now > back && !w.isAt(c, to) {
			back = now
			w.ask(c, to)
		}
		return w.isAt(c, to)
	})
}

// back returns the number of sessions returned to their source.
func (w *world) back() (n uint64) {
	for _, s := range w.servers {
		if s.agent != nil { // otherwise it is a separate process
			st, err := s.agent.Status()
			if err != nil {
				w.t.Fatal(err)
			}
			n += st.Returned
		}
	}
	return n
}

// ask asks the keeper to move the session to the other backend. Agents register at their keepers shortly after
// connecting to each other. Until then the other backend's name is not ready.
func (w *world) ask(c *client, to int) {
	w.t.Helper()
	var err error
	w.eventually(fmt.Sprintf("the keeper gives sessions to @s%d", to), func() bool {
		err = w.send(c, to)
		return !errors.Is(err, handoff.ErrNoPeer)
	})
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) mustBeAt(c *client, to int) {
	w.t.Helper()
	w.eventually(fmt.Sprint("the session is at server ", to), func() bool { return w.isAt(c, to) })
}

func (w *world) isAt(c *client, to int) bool {
	for _, session := range w.servers[to-1].member.Member().Sessions() {
		if session.RemoteAddr().String() == c.LocalAddr().String() {
			return true
		}
	}
	return false
}
