// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"syscall"

	"github.com/weir-project/weir/feature/filter/compile"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/hook"
	"golang.org/x/sys/unix"
)

// Socket is a filter on one socket, for programs filtering their own sockets. It sees packets
// before the kernel queues them on the socket, from the transport header on. Dropped packets are
// never read. It requires the right to load programs: CAP_BPF, or root before Linux 5.8. Any socket
// open in the caller will do.
//
// A Socket is not safe for concurrent use.
type Socket struct {
	conn  syscall.Conn
	at    hook.SocketFilter
	start compile.Start
	form  Filter
	coll  *kernel.Collection
}

// AttachSocket attaches rules to an open UDP, TCP or raw IP socket. It returns [kernel.ErrOccupied]
// if the socket already has a filter, or has its filter locked. The filter stays until Close, or
// until the socket is closed. Rules use lists by $name.
func AttachSocket(c syscall.Conn, rules []Rule, byDefault Action, lists ...List) (*Socket, error) {
	s := &Socket{conn: c}
	err := s.control(func(fd int) error {
		var err error
		s.start, err = packetStart(fd)
		return err
	})
	if err == nil {
		s.at.Name = socketName(c)
		err = s.Replace(rules, byDefault, lists...)
	}
	if err != nil {
		return nil, err
	}
	return s, nil
}

// socketName returns the name of a socket for errors.
func socketName(c syscall.Conn) string {
	switch c := c.(type) {
	case interface{ LocalAddr() net.Addr }:
		return c.LocalAddr().Network() + " " + c.LocalAddr().String()
	case interface{ Addr() net.Addr }:
		return c.Addr().Network() + " " + c.Addr().String()
	}
	return "given"
}

// control calls f with the socket's descriptor.
func (s *Socket) control(f func(fd int) error) error {
	raw, err := s.conn.SyscallConn()
	if err != nil {
		return err
	}
	var inside error
	err = raw.Control(func(fd uintptr) { inside = f(int(fd)) })
	return errors.Join(err, inside)
}

// packetStart returns the first header seen by a filter of the socket.
func packetStart(fd int) (compile.Start, error) {
	domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	kind, err2 := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
	switch err := errors.Join(err, err2); {
	case err != nil:
		return 0, fmt.Errorf("read the socket's domain and type: %w", err)
	case domain != unix.AF_INET && domain != unix.AF_INET6:
		return 0, fmt.Errorf("socket has address family %d: want IPv4 or IPv6", domain)
	case domain == unix.AF_INET && kind == unix.SOCK_RAW:
		return compile.IPHeader, nil
	}
	return compile.Transport, nil
}

// Replace replaces the rules and their lists atomically: a packet meets either the old or the new
// ones. Counts restart from zero.
func (s *Socket) Replace(rules []Rule, byDefault Action, lists ...List) error {
	f := Filter{Name: "socket", Default: byDefault, Rules: slices.Clone(rules)}.withDefaults()
	ls, err := forSocket(lists)
	if err != nil {
		return err
	}
	var coll *kernel.Collection
	err = withRoom(ls, func() error {
		p, err := f.compileFor(compile.Options{Hook: compile.Socket, Start: s.start}, ls)
		if err == nil {
			coll, err = loadFilled(p, ls, nil)
		}
		return err
	})
	if err != nil {
		return err
	}
	err = s.control(func(fd int) error {
		s.at.FD = fd
		return s.at.Attach(coll.Programs[programName])
	})
	if err != nil {
		coll.Close()
		return err
	}
	if s.coll != nil {
		s.coll.Close()
	}
	s.form, s.coll = f, coll
	return nil
}

// Rules returns the counts of each rule and of the default since the last attachment.
func (s *Socket) Rules() (rules []RuleState, byDefault RuleState, err error) {
	for i, r := range append(s.form.Rules[:len(s.form.Rules):len(s.form.Rules)], Rule{Action: s.form.Default}) {
		t, err := sumCounts(s.coll.Maps[countsMap], i)
		if err != nil {
			return nil, byDefault, err
		}
		st := RuleState{Name: r.Name, Match: r.Match.Text, Action: r.Action, Packets: t.Packets, Bytes: t.Bytes, Last: kernel.WallTime(t.Last)}
		if i < len(s.form.Rules) {
			rules = append(rules, st)
		} else {
			byDefault = st
		}
	}
	return rules, byDefault, nil
}

// Close detaches the filter. The socket stays open.
func (s *Socket) Close() error {
	err := s.control(func(fd int) error { s.at.FD = fd; return s.at.Detach() })
	s.coll.Close()
	if errors.Is(err, net.ErrClosed) {
		return nil // the filter ended with the socket
	}
	return err
}
