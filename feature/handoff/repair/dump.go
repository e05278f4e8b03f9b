// SPDX-License-Identifier: Apache-2.0

package repair

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/sock"
	"github.com/weir-project/weir/internal/bounded"
)

// DumpOptions configure a dump.
type DumpOptions struct {
	// Limit is the maximum total of bytes in the queues. 0 means [defaultLimit]. It is checked before any change.
	Limit int
	// Stop, if set, blocks the session's packets before the dump. It is not called for a session rejected by the
	// first checks. Dump calls its release function, which unblocks them, if it fails.
	Stop func(Flow) (release func(), err error)
	// Quiet is the maximum time to wait, before Stop, for a kTLS session to become idle. 0 means [DefaultQuiet]; a
	// negative value means no waiting.
	Quiet time.Duration
}

// Prepared is the constant part of a session's state, read while packets still arrive. It more than halves the time
// of the dump, during which the session is stopped.
type Prepared struct {
	flow  Flow
	tls   bool
	state State // addresses, options, and the other constant fields
}

// Prepare rejects immovable sessions, with the errors of [Dump], and reads the constant state. It changes nothing.
// The application must not use the socket any more. The result is valid for one prompt dump of the same socket: a
// later change of an option is lost.
func Prepare(fd int, o DumpOptions) (*Prepared, error) {
	s, tls, err := admit(fd, o)
	p := &Prepared{flow: s.Flow(), tls: tls, state: s}
	if err == nil {
		err = p.state.readStays(fd)
	}
	if err != nil {
		return nil, fmt.Errorf("dump %s: %w", p.flow, err)
	}
	return p, nil
}

// Dump reads a connection's state and leaves its socket frozen. close(2) then ends it without a packet; [Resume]
// continues it here. If Dump fails, the session continues. The error is or wraps an error of this package or of
// the kernel, for example EPERM without CAP_NET_ADMIN.
//
// fd may be blocking or not, and may belong to another network namespace than the caller. The caller keeps it open,
// and keeps other users away from it.
func Dump(fd int, o DumpOptions) (*State, error) {
	p, err := Prepare(fd, o)
	if err != nil {
		return nil, err
	}
	return p.Dump(fd, o)
}

// Dump is the function [Dump] for a prepared session.
func (p *Prepared) Dump(fd int, o DumpOptions) (_ *State, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("dump %s: %w", p.flow, err)
		}
	}()
	if p.tls {
		if err := quiesce(fd, o); err != nil {
			return nil, err
		}
	}
	if o.Stop != nil {
		release, err2 := o.Stop(p.flow)
		if err2 != nil {
			return nil, fmt.Errorf("block its packets: %w", err2)
		}
		defer func() {
			if err != nil && release != nil {
				release()
			}
		}()
	}
	if err := checkUrgent(fd, p.tls && decrypts(fd)); err != nil {
		return nil, err
	}
	// Packets that passed before the block may still be under way to the socket on another CPU, for some
	// microseconds.
	for try := 1; ; try++ {
		s, err := p.freeze(fd, o)
		if !errors.Is(err, errMoving) || o.Stop == nil || try == maxFreezes {
			return s, err
		}
	}
}

// maxFreezes is the number of attempts to read a blocked socket without a concurrent change.
const maxFreezes = 3

func (f Flow) String() string { return fmt.Sprintf("%s-%s", f.Local, f.Remote) }

// freeze enables repair mode and reads the socket.
func (p *Prepared) freeze(fd int, o DumpOptions) (_ *State, err error) {
	if err := setInt(fd, unix.IPPROTO_TCP, unix.TCP_REPAIR, repairOn); err != nil {
		return nil, explainRepair(err)
	}
	s := p.state
	if p.tls {
		s.TLS = &TLS{}
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, thaw(fd, s.ReuseAddr, repairOffQuiet))
		}
	}()
	if err := s.read(fd, dumpLimit(o)); err != nil {
		return nil, err
	}
	return &s, nil
}

// Resume continues a socket frozen by [Dump]. The caller must know that the state was not restored anywhere.
func Resume(fd int, s *State) error { return thaw(fd, s.ReuseAddr, repairOff) }

func thaw(fd int, reuse bool, how int) error {
	err := setInt(fd, unix.IPPROTO_TCP, unix.TCP_REPAIR, how)
	if err == nil && reuse {
		err = setInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	}
	if err != nil {
		return fmt.Errorf("continue the session: %w", err)
	}
	return nil
}

func dumpLimit(o DumpOptions) int {
	if o.Limit == 0 {
		return defaultLimit
	}
	return o.Limit
}

// admit rejects immovable sessions, and changes nothing. It returns the session's addresses, and whether it has kTLS.
func admit(fd int, o DumpOptions) (s State, tls bool, err error) {
	if p, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL); err != nil {
		return s, tls, fmt.Errorf("SO_PROTOCOL: %w", err)
	} else if p == protocolMPTCP {
		return s, tls, errMPTCP
	} else if p != unix.IPPROTO_TCP {
		return s, tls, fmt.Errorf("%w: its protocol is number %d, not TCP", errState, p)
	}
	i, err := tcpInfo(fd)
	if err != nil {
		return s, tls, err
	}
	if !movable(i.State) {
		return s, tls, fmt.Errorf("%w: %s", errState, stateName(i.State))
	}
	if err := s.readAddresses(fd); err != nil {
		return s, tls, err
	}
	if name, err := unix.GetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_ULP); err == nil && name != "" && name != "tls" {
		return s, tls, fmt.Errorf("%w: it is %s", errULP, name)
	} else if err == nil {
		tls = name == "tls"
	}
	// The kernel returns ENOENT if no key was ever set.
	var ao [64]byte
	if err := getTCP(fd, tcpAOInfo, &ao); err == nil {
		return s, tls, errAO
	}
	if off, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, soPeekOff); err == nil && off >= 0 {
		return s, tls, errPeekOff
	}
	l, err := queueLengths(fd)
	if err == nil {
		err = tooLarge(l.unread+l.unacked, dumpLimit(o))
	}
	return s, tls, err
}

func tooLarge(n, limit int) error {
	if n > limit {
		return fmt.Errorf("%w: %d bytes, at most %d: let the session drain, or raise the limit", errTooLarge, n, limit)
	}
	return nil
}

func movable(state uint8) bool {
	switch state {
	case stateEstablished, stateFinWait1, stateFinWait2, stateCloseWait, stateLastAck, stateClosing:
		return true
	}
	return false
}

// checkUrgent detects urgent data, announced or received, that is unread. Inside the stream (SO_OOBINLINE) it is an
// ordinary byte, if the kernel can peek past it (Linux 6.9). SIOCINQ counts up to the urgent byte, and past it inside
// the stream. If the kernel decrypts, a peek would take a record out of the queue; any record there prevents the move
// anyway.
func checkUrgent(fd int, decrypts bool) (err error) {
	if decrypts {
		return nil
	}
	inline, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_OOBINLINE)
	if err != nil {
		return fmt.Errorf("read SO_OOBINLINE: %w", err)
	}
	if inline != 0 && sock.PassesMarks(fd) {
		return nil
	}
	defer func() { err = errors.Join(err, setInt(fd, unix.SOL_SOCKET, unix.SO_OOBINLINE, inline)) }()
	var unread [2]int
	for _, i := range []int{1, 0} { // in this order, data arriving in between does not look urgent
		if err := setInt(fd, unix.SOL_SOCKET, unix.SO_OOBINLINE, i); err != nil {
			return fmt.Errorf("set SO_OOBINLINE: %w", err)
		}
		if unread[i], err = unix.IoctlGetInt(fd, unix.SIOCINQ); err != nil {
			return fmt.Errorf("read the length of the receive queue: %w", err)
		}
	}
	// EINVAL: none. EAGAIN: the byte is under way. 0: the peer's FIN came first.
	n, _, err := unix.Recvfrom(fd, make([]byte, 1), unix.MSG_OOB|unix.MSG_PEEK|unix.MSG_DONTWAIT)
	if n > 0 || errors.Is(err, unix.EAGAIN) || unread[0] < unread[1] {
		return errUrgent
	}
	return nil
}

// readAddresses fills in the addresses of both ends.
func (s *State) readAddresses(fd int) error {
	local, err := bounded.Getsockname(fd)
	if err != nil {
		return fmt.Errorf("read the local address: %w", err)
	}
	remote, err := bounded.Getpeername(fd)
	if err != nil {
		return fmt.Errorf("read the peer's address: %w", err)
	}
	var zone uint32
	for _, a := range []struct {
		from unix.Sockaddr
		to   *netip.AddrPort
	}{{local, &s.Local}, {remote, &s.Remote}} {
		switch sa := a.from.(type) {
		case *unix.SockaddrInet4:
			*a.to = netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
		case *unix.SockaddrInet6:
			*a.to = netip.AddrPortFrom(netip.AddrFrom16(sa.Addr), uint16(sa.Port))
			zone = max(zone, sa.ZoneId)
		default:
			return fmt.Errorf("%w: it is neither IPv4 nor IPv6", errState)
		}
	}
	if zone != 0 {
		s.Zone, err = deviceName(fd, int(zone))
	}
	return err
}
