// SPDX-License-Identifier: Apache-2.0

// Package sockdiag lists and closes the sockets of a network namespace through the kernel's
// sock_diag netlink family (sock_diag(7), linux/inet_diag.h).
//
// All functions work in the network namespace of the calling thread. Use netns.Handle.Do for
// another.
package sockdiag

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// TCP states as numbered by the kernel (net/tcp_states.h). UDP sockets use two of them: Established
// when connected, Close otherwise.
const (
	Established   = 1
	SynSent       = 2
	SynRecv       = 3
	FinWait1      = 4
	FinWait2      = 5
	TimeWait      = 6
	Close         = 7
	CloseWait     = 8
	LastAck       = 9
	Listen        = 10
	Closing       = 11
	NewSynRecv    = 12
	BoundInactive = 13 // bound, but neither listening nor connected; listed since 6.8
)

var (
	// errNoDiag reports a protocol without diagnostics: the module (tcp_diag, udp_diag) is missing
	// and was not loaded on demand.
	errNoDiag = errors.New("no socket diagnostics")
	// ErrNoSocket reports a closed socket.
	ErrNoSocket = errors.New("no such socket")
	// errInterrupted reports several attempts to list sockets during constant changes.
	errInterrupted = errors.New("socket list changed while it was read")
)

// dumpAttempts limits the attempts for a consistent list.
const dumpAttempts = 5

// Socket is one TCP or UDP socket.
type Socket struct {
	Proto  uint8 // IPPROTO_TCP or IPPROTO_UDP
	Family uint8 // AF_INET or AF_INET6
	State  uint8 // Established … BoundInactive

	// Local and Remote are IPv4-mapped addresses for IPv4 traffic of an AF_INET6 socket. Unmap them
	// to compare.
	Local, Remote netip.AddrPort

	Inode     uint32 // of the file, as in /proc/PID/fd; 0 without one (SYN_RECV, TIME_WAIT)
	Cookie    uint64 // SO_COOKIE, never reused during one boot
	UID       uint32 // owner, as compared by the kernel's reuseport groups
	Interface uint32 // index of the bound interface, 0 for none

	// RecvQueue and SendQueue are in bytes. For a TCP listener they are the number of connections
	// waiting for accept, and its limit, the backlog.
	RecvQueue, SendQueue uint32

	V6Only bool // AF_INET6 without IPv4; known for TCP listeners and unconnected UDP
	Mem    Memory
	Info   *TCPInfo // nil unless Query.Info, and for UDP
}

// Memory is the receive part of a socket's INET_DIAG_SKMEMINFO.
type Memory struct {
	RcvAlloc uint32 // bytes queued, including the kernel's overhead
	RcvBuf   uint32 // limit in bytes, twice the value set by SO_RCVBUF
	Drops    uint32 // packets dropped at the socket, mostly for lack of buffer
}

// TCPInfo is the part of struct tcp_info (linux/tcp.h) used by weir.
type TCPInfo struct {
	BytesReceived, BytesAcked  uint64
	SegsIn, SegsOut            uint32
	DataSegsIn, DataSegsOut    uint32
	LastDataRecv, LastDataSent time.Duration // ago; resolution of a jiffy
	RTT, RTTVar                time.Duration // smoothed; resolution of a microsecond
	TotalRetrans               uint32        // segments
}

// Query selects the sockets to list.
type Query struct {
	Proto     uint8  // IPPROTO_TCP or IPPROTO_UDP
	States    uint32 // bit mask of 1<<state, 0 for all
	LocalPort uint16 // 0 for any; filtered by the kernel
	Info      bool   // fill Socket.Info
}

// Dump lists the matching sockets of both families. The list is no snapshot: it may or may not
// contain sockets opened or closed meanwhile.
func Dump(q Query) ([]Socket, error) {
	if q.Proto != unix.IPPROTO_TCP && q.Proto != unix.IPPROTO_UDP {
		return nil, fmt.Errorf("list sockets: protocol %d: want 6 (TCP) or 17 (UDP)", q.Proto)
	}
	return dump(q, uint32(q.Proto))
}

// MPTCPListeners lists the listening MPTCP sockets on a port, 0 for any. They also carry plain TCP
// connections, but BPF socket maps reject them. The list is empty if the kernel has no MPTCP or
// cannot list it (before 5.17). Proto is IPPROTO_TCP in the results, because 262 does not fit.
func MPTCPListeners(port uint16) ([]Socket, error) {
	q := Query{Proto: unix.IPPROTO_TCP, States: 1 << Listen, LocalPort: port}
	sockets, err := dump(q, unix.IPPROTO_MPTCP)
	if errors.Is(err, errNoDiag) {
		return nil, nil
	}
	return sockets, err
}

func dump(q Query, proto uint32) ([]Socket, error) {
	c, err := netlink.Dial(unix.NETLINK_SOCK_DIAG, nil)
	if err != nil {
		return nil, fmt.Errorf("list sockets: open sock_diag: %w", err)
	}
	defer c.Close()
	var sockets []Socket
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		req, err := dumpRequest(q, proto, family)
		if err != nil {
			return nil, fmt.Errorf("list sockets: %w", err)
		}
		msgs, err := consistent(func() ([]netlink.Message, error) { return c.Execute(req) })
		if err != nil {
			return nil, fmt.Errorf("list sockets: %w", explainDump(err, proto))
		}
		for _, m := range msgs {
			s, err := parse(m.Data, q)
			if err != nil {
				return nil, fmt.Errorf("list sockets: %w", err)
			}
			sockets = append(sockets, s)
		}
	}
	return sockets, nil
}

// consistent repeats a dump marked as interrupted by the kernel.
func consistent(dump func() ([]netlink.Message, error)) ([]netlink.Message, error) {
	for range dumpAttempts {
		msgs, err := dump()
		if err != nil {
			return nil, err
		}
		if !interrupted(msgs) {
			return msgs, nil
		}
	}
	return nil, fmt.Errorf("%w, %d times; try again", errInterrupted, dumpAttempts)
}

func interrupted(msgs []netlink.Message) bool {
	for _, m := range msgs {
		if m.Header.Flags&netlink.DumpInterrupted != 0 {
			return true
		}
	}
	return false
}

func explainDump(err error, proto uint32) error {
	// inet_diag_lock_handler: no handler was registered and none could be loaded.
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EPROTONOSUPPORT) {
		module := map[uint32]string{unix.IPPROTO_TCP: "tcp_diag", unix.IPPROTO_UDP: "udp_diag", unix.IPPROTO_MPTCP: "mptcp_diag"}[proto]
		return fmt.Errorf("%w for IP protocol %d: load the module with `modprobe %s`, or use a kernel that has it: %w",
			errNoDiag, proto, module, err)
	}
	return err
}

// Destroy closes a socket of any process, like `ss -K`. Its owner gets ECONNABORTED, and a TCP peer
// a reset. The socket is identified by its addresses and cookie, so another socket on the same
// addresses is safe. Destroy requires CAP_NET_ADMIN. The error wraps [ErrNoSocket] for a closed
// socket, and [errors.ErrUnsupported] on a kernel without CONFIG_INET_DIAG_DESTROY.
func Destroy(s Socket) error {
	c, err := netlink.Dial(unix.NETLINK_SOCK_DIAG, nil)
	if err != nil {
		return fmt.Errorf("close socket: open sock_diag: %w", err)
	}
	defer c.Close()
	req, err := destroyRequest(s)
	if err != nil {
		return fmt.Errorf("close socket: %w", err)
	}
	_, err = c.Execute(req)
	what := fmt.Sprintf("close socket %s (peer %s)", s.Local, s.Remote)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENOENT):
		return fmt.Errorf("%s: %w", what, ErrNoSocket)
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("%s: run as root or with CAP_NET_ADMIN: %w", what, err)
	case errors.Is(err, unix.EOPNOTSUPP):
		return fmt.Errorf("%s: this kernel lacks CONFIG_INET_DIAG_DESTROY: %w", what, errors.ErrUnsupported)
	}
	return fmt.Errorf("%s: %w", what, err)
}
