// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// clientAddress is the source of datagrams.
var clientAddress = [4]byte{198, 19, 200, 1}

// nonceBytes is the length of a datagram: a unique number, to detect late answers.
const nonceBytes = 8

// target is an address to query for its service.
type target struct {
	addr [4]byte
	port int
	tcp  bool
}

func at(host uint32, port int, tcp bool) target { return target{serviceAddr(host).As4(), port, tcp} }

// ownTarget returns the target of a service's own socket.
func ownTarget(service int) target {
	return target{ownAddress(service), ownPort(service), serviceProto(service) == unix.IPPROTO_TCP}
}

func (t target) String() string {
	proto := "udp"
	if t.tcp {
		proto = "tcp"
	}
	return fmt.Sprintf("%s %d.%d.%d.%d:%d", proto, t.addr[0], t.addr[1], t.addr[2], t.addr[3], t.port)
}

// patience is a client's timeout. An answer takes a moment, and this machine loses none.
const patience = 30 * time.Second

// client sends from the thread of its creation, because the namespace belongs to the thread.
type client struct {
	udp   int // of many datagrams; not connected, because answers come from the service's own address
	nonce uint64
}

func newClient() (*client, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	c := &client{udp: fd}
	tv := unix.NsecToTimeval(int64(patience))
	if err = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err == nil {
		err = unix.Bind(fd, &unix.SockaddrInet4{Addr: clientAddress})
	}
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	return c, nil
}

func (c *client) close() { unix.Close(c.udp) }

// ask returns the answering service.
func (c *client) ask(t target) (service int, err error) {
	if t.tcp {
		return c.connect(t)
	}
	return c.send(t)
}

func (c *client) send(t target) (int, error) {
	c.nonce++
	var b [64]byte
	binary.BigEndian.PutUint64(b[:], c.nonce)
	if err := unix.Sendto(c.udp, b[:nonceBytes], 0, &unix.SockaddrInet4{Addr: t.addr, Port: t.port}); err != nil {
		return 0, err
	}
	for {
		n, _, err := unix.Recvfrom(c.udp, b[:], 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return 0, fmt.Errorf("no answer within %s: %w", patience, err)
		}
		if n == nonceBytes+4 && binary.BigEndian.Uint64(b[:]) == c.nonce {
			return int(binary.BigEndian.Uint32(b[nonceBytes:])), nil
		}
	}
}

// connect reads the answer and resets the connection. No side then keeps state about it.
func (c *client) connect(t target) (int, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	tv := unix.NsecToTimeval(int64(patience))
	err = errors.Join(unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &tv),
		unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}))
	if err != nil {
		return 0, err
	}
	err = unix.Connect(fd, &unix.SockaddrInet4{Addr: t.addr, Port: t.port})
	if errors.Is(err, unix.EINTR) { // a signal of Go's; the connection continues
		err = finish(fd)
	}
	if err != nil {
		return 0, fmt.Errorf("connect: %w", err)
	}
	var b [4]byte
	for got := 0; got < len(b); {
		n, err := unix.Read(fd, b[got:])
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || n == 0 {
			return 0, fmt.Errorf("the connection ended without an answer (%d bytes): %w", got, errors.Join(err, errShort))
		}
		got += n
	}
	return int(binary.BigEndian.Uint32(b[:])), nil
}

var errShort = errors.New("want 4 bytes")

// finish waits for a connection in progress.
func finish(fd int) error {
	end := time.Now().Add(patience)
	for {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
		n, err := unix.Poll(fds, int(time.Until(end).Milliseconds()))
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return err
		case n == 0:
			return unix.ETIMEDOUT
		default:
			code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
			if err == nil && code != 0 {
				err = unix.Errno(code)
			}
			return err
		}
	}
}
