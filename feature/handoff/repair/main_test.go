// SPDX-License-Identifier: Apache-2.0

package repair

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"testing"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// port is the service's port.
const port = 9000

// world is a network with two servers and a client.
type world struct {
	*nstest.Movable
	t testing.TB
}

func newWorld(t testing.TB) *world {
	t.Helper()
	return &world{nstest.NewMovable(t, nil), t}
}

func (w *world) do(h *netns.Handle, f func() error) {
	w.t.Helper()
	if err := h.Do(f); err != nil {
		w.t.Fatal(err)
	}
}

// move moves a session to the other server, through the wire format.
func (w *world) move(from dumper) *Conn {
	w.t.Helper()
	return w.moveState(from, nil)
}

type dumper interface {
	Dump(DumpOptions) (*State, error)
	Close() error
}

// fresh is a session that never moved.
type fresh struct{ *net.TCPConn }

func (f fresh) Dump(o DumpOptions) (*State, error) { return DumpConn(f.TCPConn, o) }

func (w *world) moveState(from dumper, look func(*State)) *Conn {
	w.t.Helper()
	s := w.dump(from)
	if look != nil {
		look(s)
	}
	return w.restore(s)
}

func (w *world) dump(from dumper) *State {
	w.t.Helper()
	s, err := from.Dump(DumpOptions{Stop: func(Flow) (func(), error) {
		w.Hold()
		w.Disown(w.Owner)
		return func() { w.Own(w.Owner); w.Route(w.Owner); w.Release() }, nil
	}})
	if err != nil {
		w.t.Fatal(err)
	}
	if err := from.Close(); err != nil {
		w.t.Fatal(err)
	}
	b, err := s.MarshalBinary()
	if err != nil {
		w.t.Fatal(err)
	}
	if s, err = Parse(b); err != nil {
		w.t.Fatal(err)
	}
	return s
}

func (w *world) restore(s *State) (c *Conn) {
	w.t.Helper()
	w.Own(1 - w.Owner)
	w.do(w.Servers[w.Owner], func() (err error) {
		c, err = restore(s, RestoreOptions{Probe: w.Drop})
		return err
	})
	w.t.Cleanup(func() { c.Close() })
	w.Route(w.Owner)
	w.Release()
	return c
}

// pair connects the client with the service's current owner. The shape functions set options before connect and
// listen.
func (w *world) pair(network string, shapeClient, shapeServer func(fd int) error) (client, server *net.TCPConn) {
	w.t.Helper()
	addr, bind := w.V4, ""
	if network == "tcp6" {
		addr = w.V6
	} else if network == "tcp" {
		bind = "::" // IPv4 on a dual-stack socket
	}
	lc := net.ListenConfig{Control: shape(shapeServer)}
	lc.SetMultipathTCP(false)
	var ln net.Listener
	w.do(w.Servers[w.Owner], func() (err error) {
		listen := net.JoinHostPort(addr.String(), fmt.Sprint(port))
		if bind != "" {
			listen = net.JoinHostPort(bind, fmt.Sprint(port))
		}
		ln, err = lc.Listen(w.t.Context(), network, listen)
		return err
	})
	defer ln.Close()
	d := net.Dialer{Timeout: patience, Control: shape(shapeClient)}
	w.do(w.Client, func() error {
		c, err := d.Dial("tcp", netip.AddrPortFrom(addr, port).String())
		if err == nil {
			client = c.(*net.TCPConn)
		}
		return err
	})
	c, err := ln.Accept()
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { client.Close(); c.Close() })
	return client, c.(*net.TCPConn)
}

// pattern fills b with a byte stream that does not repeat within any TCP window.
func pattern(b []byte, offset uint64) {
	for i := range b {
		x := (offset + uint64(i)) * 0x9e3779b97f4a7c15
		b[i] = byte(x >> 56)
	}
}

// verify checks that b is the pattern from offset on.
func verify(b []byte, offset uint64) error {
	want := make([]byte, len(b))
	pattern(want, offset)
	if bytes.Equal(b, want) {
		return nil
	}
	for i := range b {
		if b[i] != want[i] {
			return fmt.Errorf("byte %d is %#x, want %#x", offset+uint64(i), b[i], want[i])
		}
	}
	return nil
}

// shape returns a Control function for a new socket.
func shape(f func(fd int) error) func(string, string, rawConn) error {
	return func(_, _ string, c rawConn) (err error) {
		if f == nil {
			return nil
		}
		err2 := c.Control(func(fd uintptr) { err = f(int(fd)) })
		return errors.Join(err, err2)
	}
}

// together runs functions concurrently and waits for them.
func together(fs ...func()) {
	var wg sync.WaitGroup
	for _, f := range fs {
		wg.Go(f)
	}
	wg.Wait()
}

// restore is [Build] and [Built.Start].
func restore(s *State, o RestoreOptions) (*Conn, error) {
	b, err := Build(s, o)
	if err != nil {
		return nil, err
	}
	return b.Start()
}

// resumeConn is [Resume] for a connection of package net.
func resumeConn(c syscall.Conn, s *State) (err error) {
	err2 := control(c, func(fd int) { err = Resume(fd, s) })
	if err2 != nil {
		return err2
	}
	return err
}
