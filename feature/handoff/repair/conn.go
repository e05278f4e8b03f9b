// SPDX-License-Identifier: Apache-2.0

package repair

import (
	"fmt"
	"io"
	"net"
	"slices"
	"syscall"
)

// Conn is a restored session. Reads return the data received at its former host first, then data from the socket. One
// goroutine may read, and one write.
type Conn struct {
	*net.TCPConn
	Lost []string // see [Built]

	unread []byte
}

// Read implements [net.Conn].
func (c *Conn) Read(b []byte) (int, error) {
	if len(c.unread) > 0 {
		n := copy(b, c.unread)
		c.unread = c.unread[n:]
		return n, nil
	}
	return c.TCPConn.Read(b)
}

// WriteTo implements [io.WriterTo]. Without it io.Copy would bypass Read.
func (c *Conn) WriteTo(w io.Writer) (int64, error) {
	var n int64
	for len(c.unread) > 0 {
		m, err := w.Write(c.unread)
		c.unread = c.unread[m:]
		n += int64(m)
		if err != nil {
			return n, err
		}
	}
	m, err := c.TCPConn.WriteTo(w)
	return n + m, err
}

// Unread returns the data that Read delivers before the socket's, for users of the descriptor.
func (c *Conn) Unread() []byte { return c.unread }

// Dump is [DumpConn] for a session that has moved before. It includes the data still unread from that move.
func (c *Conn) Dump(o DumpOptions) (*State, error) {
	if err := tooLarge(len(c.unread), dumpLimit(o)); err != nil {
		return nil, fmt.Errorf("dump %s-%s: %w", c.LocalAddr(), c.RemoteAddr(), err)
	}
	o.Limit = max(1, dumpLimit(o)-len(c.unread)) // 0 would mean the default
	s, err := DumpConn(c.TCPConn, o)
	if err != nil {
		return nil, err
	}
	s.Unread = slices.Concat(c.unread, s.Unread)
	return s, nil
}

// DumpConn is [Dump] for a connection of package net. Closing it afterwards is silent. No other goroutine may be in
// its Read or Write.
func DumpConn(c syscall.Conn, o DumpOptions) (s *State, err error) {
	err2 := control(c, func(fd int) { s, err = Dump(fd, o) })
	if err2 != nil {
		return nil, err2
	}
	return s, err
}

func control(c syscall.Conn, f func(fd int)) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	return raw.Control(func(fd uintptr) { f(int(fd)) })
}
