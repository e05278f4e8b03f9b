// SPDX-License-Identifier: Apache-2.0

// Package sock reads the kernel's state of a socket for a hand-over: its identity, and how far its
// stream has been read and written. It also discards bytes that were read before.
package sock

import (
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/wire"
	"github.com/weir-project/weir/internal/bounded"
)

// These are the TCP states (net/tcp_states.h) after a received or sent FIN. The FIN has a sequence
// number of its own, but is no byte of the stream.
const (
	finReceived = 1<<unix.BPF_TCP_CLOSE_WAIT | 1<<unix.BPF_TCP_LAST_ACK | 1<<unix.BPF_TCP_CLOSING | 1<<unix.BPF_TCP_TIME_WAIT
	finSent     = 1<<unix.BPF_TCP_FIN_WAIT1 | 1<<unix.BPF_TCP_FIN_WAIT2 | 1<<unix.BPF_TCP_CLOSING | 1<<unix.BPF_TCP_LAST_ACK | 1<<unix.BPF_TCP_TIME_WAIT
)

// ErrClosed reports a connection that was reset, or closed by both ends.
var ErrClosed = errors.New("the connection is closed")

// Positions are byte counts of a TCP connection since it was established.
type Positions struct {
	Read    uint64 // bytes read from the receive queue, by any owner of the socket
	Written uint64 // bytes written to the send queue
}

// ReadPositions reads the positions from the kernel. Read is the received bytes
// (tcpi_bytes_received) minus the queued ones (SIOCINQ). Written is the acknowledged bytes
// (tcpi_bytes_acked) plus the queued ones (SIOCOUTQ). The numbers are exact, even if several
// processes have used the socket and some were killed. The error wraps [ErrClosed] for a closed
// connection.
func ReadPositions(fd int) (Positions, error) {
	info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	// Segments arrive meanwhile. Repeat until both halves of each sum are of the same instant.
	for err == nil {
		before := info
		var in, out int
		if in, err = unix.IoctlGetInt(fd, unix.SIOCINQ); err != nil {
			break
		}
		if out, err = unix.IoctlGetInt(fd, unix.SIOCOUTQ); err != nil {
			break
		}
		if info, err = unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO); err != nil {
			break
		}
		if info.State == unix.BPF_TCP_CLOSE {
			return Positions{}, ErrClosed
		}
		if info.Bytes_received == before.Bytes_received && info.Bytes_acked == before.Bytes_acked && info.State == before.State {
			return Positions{
				Read:    info.Bytes_received - uint64(in) - fin(finReceived, info.State),
				Written: info.Bytes_acked + uint64(out) - fin(finSent, info.State),
			}, nil
		}
	}
	return Positions{}, fmt.Errorf("read positions of a TCP connection: %w", err)
}

func fin(states uint32, state uint8) uint64 { return uint64(states >> state & 1) }

// Discard removes n bytes from the receive queue, already processed by a predecessor. It fails if
// the queue has fewer bytes.
func Discard(fd int, n uint64) error {
	var tries atMark
	for n > 0 {
		// With MSG_TRUNC, TCP drops the bytes without copying them (tcp(7)).
		got, err := truncate(fd, int(min(n, 1<<30)))
		switch {
		case err == unix.EINTR, err == unix.EAGAIN && tries.again(fd):
			continue
		case err != nil:
			return fmt.Errorf("discard %d bytes already read: %w", n, err)
		case got == 0:
			return fmt.Errorf("discard %d bytes already read: the queue has fewer", n)
		}
		n -= uint64(got)
	}
	return nil
}

// Cookie returns the kernel's identifier of a socket. All duplicates have the same.
func Cookie(fd int) (uint64, error) {
	c, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
	if err != nil {
		return 0, fmt.Errorf("read the socket's cookie: %w", err)
	}
	return c, nil
}

// Check verifies that a descriptor is a socket of the kind. The error wraps [wire.ErrBadSocket] and
// describes the descriptor.
func Check(fd int, k wire.Kind) error {
	bad := func(format string, a ...any) error {
		return fmt.Errorf("%w: %s", wire.ErrBadSocket, fmt.Sprintf(format, a...))
	}
	domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	if err != nil {
		return bad("the descriptor is not a socket")
	}
	if domain != unix.AF_INET && domain != unix.AF_INET6 {
		return bad("it is of address family %d; only IPv4 and IPv6 sockets are kept", domain)
	}
	proto, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL)
	if err != nil {
		return bad("read its protocol: %v", err)
	}
	if proto == unix.IPPROTO_MPTCP {
		return bad("it is MPTCP, and the kernel does not report its positions: use plain TCP (Go: ListenConfig.SetMultipathTCP(false))")
	}
	want := unix.IPPROTO_TCP
	if k == wire.Packet {
		want = unix.IPPROTO_UDP
	}
	if proto != want {
		return bad("its protocol is %d, and a %s needs %d", proto, k, want)
	}
	if k == wire.Packet {
		return nil
	}
	listens, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
	switch {
	case err != nil:
		return bad("read whether it listens: %v", err)
	case k == wire.Listener && listens == 0:
		return bad("it does not listen")
	case k == wire.Stream && listens != 0:
		return bad("it listens; a session is a connection")
	case k != wire.Stream && k != wire.Listener:
		return bad("unknown %s", k)
	}
	return nil
}

// Addresses returns the two ends of a socket. A missing one is the zero value.
func Addresses(fd int) (local, remote netip.AddrPort) {
	if a, err := bounded.Getsockname(fd); err == nil {
		local = addrPort(a)
	}
	if a, err := bounded.Getpeername(fd); err == nil {
		remote = addrPort(a)
	}
	return local, remote
}

func addrPort(a unix.Sockaddr) netip.AddrPort {
	switch a := a.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr).Unmap(), uint16(a.Port))
	}
	return netip.AddrPort{}
}

// Reset closes a connection with a reset, so the peer does not mistake the end for an orderly one.
func Reset(fd int) {
	unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	unix.Close(fd)
}
