// SPDX-License-Identifier: Apache-2.0

package routers

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
)

// Dialer opens sockets in a network namespace from one thread inside it. Hundreds of routers can reconnect
// at the same moment without a thread each.
type Dialer struct {
	jobs chan func()
	done chan error
}

// NewDialer starts the thread. Close ends it; its sockets stay open.
func NewDialer(ns *netns.Handle) *Dialer {
	d := &Dialer{jobs: make(chan func()), done: make(chan error, 1)}
	go func() {
		d.done <- ns.Do(func() error {
			for job := range d.jobs {
				job()
			}
			return nil
		})
	}()
	return d
}

// Close ends the thread. Dial must not be called after it.
func (d *Dialer) Close() error {
	close(d.jobs)
	return <-d.done
}

// Dial opens a socket of the network ("udp" or "tcp") bound to the address from and connected to to. It
// returns at once: the first write or read reports a failed TCP connection.
func (d *Dialer) Dial(network string, from netip.Addr, to netip.AddrPort) (conn net.Conn, err error) {
	kind := unix.SOCK_DGRAM
	if network == "tcp" {
		kind = unix.SOCK_STREAM
	}
	finished := make(chan struct{})
	job := func() {
		defer close(finished)
		var fd int
		if fd, err = connect(kind, from, to); err != nil {
			err = fmt.Errorf("%s from %s to %s: %w", network, from, to, err)
			return
		}
		f := os.NewFile(uintptr(fd), network)
		conn, err = net.FileConn(f)
		f.Close()
	}
	select {
	case d.jobs <- job:
		<-finished
		return conn, err
	case failed := <-d.done: // entering the namespace failed
		d.done <- failed
		return nil, failed
	}
}

func connect(kind int, from netip.Addr, to netip.AddrPort) (int, error) {
	family := unix.AF_INET
	if from.Is6() {
		family = unix.AF_INET6
	}
	fd, err := unix.Socket(family, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	// The port is chosen at connect. At bind, thousands of short sessions would use up the ports of the
	// range.
	if kind == unix.SOCK_STREAM {
		_ = unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1)
	}
	if err := unix.Bind(fd, sockaddr(netip.AddrPortFrom(from, 0))); err != nil {
		unix.Close(fd)
		return -1, err
	}
	if err := unix.Connect(fd, sockaddr(to)); err != nil && !errors.Is(err, unix.EINPROGRESS) {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}
