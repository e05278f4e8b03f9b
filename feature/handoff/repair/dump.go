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

// DumpOptions say how a session is dumped.
type DumpOptions struct {
	// Limit is how many bytes the queues may hold together; 0 means [defaultLimit].
	// It is checked before anything is changed.
	Limit int
	// Stop, if it is set, stops the session's packets before the dump, and is not
	// called for a session that is refused at sight. What it returns lets them in
	// again, and is called if the dump fails.
	Stop func(Flow) (release func(), err error)
	// Quiet is for how long a session of kTLS may be waited for, before Stop, until nothing of it is on its way; 0
	// means [DefaultQuiet], less than 0 that it is looked at once.
	Quiet time.Duration
}

// Prepared is what of a session does not change once its application has let go of it, read while packets still come: what the
// dump has left to read then is done in less than half the time, in which the session stands still.
type Prepared struct {
	flow  Flow
	tls   bool
	state State // its addresses, options, and what else stays
}

// Prepare refuses what cannot be moved, with the errors of [Dump], and reads what stays; it changes nothing. What is prepared is
// for one dump of the same socket, soon: an option that is set in between is lost.
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

// Dump reads a connection's state and leaves its socket frozen: close(2) then ends
// it without a packet, [Resume] has it go on here. If Dump fails, the session
// goes on, and the error is or wraps one of this package's (or is that of the kernel,
// for instance EPERM without CAP_NET_ADMIN).
//
// fd may be non-blocking or not, and in another network namespace than the caller.
// The caller keeps it open, and everybody else away from it.
func Dump(fd int, o DumpOptions) (*State, error) {
	p, err := Prepare(fd, o)
	if err != nil {
		return nil, err
	}
	return p.Dump(fd, o)
}

// Dump is [Dump] of what was prepared.
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
			return nil, fmt.Errorf("stop its packets: %w", err2)
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
	// What had passed when packets were stopped may be on its way to the socket yet, on another CPU: for some microseconds.
	for try := 1; ; try++ {
		s, err := p.freeze(fd, o)
		if !errors.Is(err, errMoving) || o.Stop == nil || try == maxFreezes {
			return s, err
		}
	}
}

// maxFreezes is how often a socket whose packets are stopped is read until nothing changes meanwhile.
const maxFreezes = 3

func (f Flow) String() string { return fmt.Sprintf("%s-%s", f.Local, f.Remote) }

// freeze switches the socket to repair and reads it.
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

// Resume has a socket that [Dump] froze go on here. Whoever dumped it must know that
// the state was not restored anywhere.
func Resume(fd int, s *State) error { return thaw(fd, s.ReuseAddr, repairOff) }

func thaw(fd int, reuse bool, how int) error {
	err := setInt(fd, unix.IPPROTO_TCP, unix.TCP_REPAIR, how)
	if err == nil && reuse {
		err = setInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	}
	if err != nil {
		return fmt.Errorf("let the session go on: %w", err)
	}
	return nil
}

func dumpLimit(o DumpOptions) int {
	if o.Limit == 0 {
		return defaultLimit
	}
	return o.Limit
}

// admit refuses what cannot be moved, and changes nothing. It reads the session's addresses, and whether it has kTLS.
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
	// The kernel says ENOENT where no key was ever set.
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
		return fmt.Errorf("%w: %d bytes, allowed are %d; let the session drain, or allow more", errTooLarge, n, limit)
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

// checkUrgent finds urgent data that was announced or received and not read, unless it lies in the stream (SO_OOBINLINE) and
// the kernel can look behind it (Linux 6.9): there it is a byte like any other. SIOCINQ
// counts up to it, and past it where it lies in the stream. Where the kernel decrypts, a
// look for it would take a record out of the queue: whatever lies there keeps the session where it is anyway.
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
	for _, i := range []int{1, 0} { // in this order, what arrives meanwhile looks like nothing urgent
		if err := setInt(fd, unix.SOL_SOCKET, unix.SO_OOBINLINE, i); err != nil {
			return fmt.Errorf("set SO_OOBINLINE: %w", err)
		}
		if unread[i], err = unix.IoctlGetInt(fd, unix.SIOCINQ); err != nil {
			return fmt.Errorf("length of the receive queue: %w", err)
		}
	}
	// EINVAL: there is none. EAGAIN: the byte is on its way. 0: the peer's FIN came first.
	n, _, err := unix.Recvfrom(fd, make([]byte, 1), unix.MSG_OOB|unix.MSG_PEEK|unix.MSG_DONTWAIT)
	if n > 0 || errors.Is(err, unix.EAGAIN) || unread[0] < unread[1] {
		return errUrgent
	}
	return nil
}

// readAddresses fills in the names of both ends.
func (s *State) readAddresses(fd int) error {
	local, err := bounded.Getsockname(fd)
	if err != nil {
		return fmt.Errorf("own address: %w", err)
	}
	remote, err := bounded.Getpeername(fd)
	if err != nil {
		return fmt.Errorf("peer's address: %w", err)
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
			return fmt.Errorf("%w: it is not of IPv4 or IPv6", errState)
		}
	}
	if zone != 0 {
		s.Zone, err = deviceName(fd, int(zone))
	}
	return err
}
