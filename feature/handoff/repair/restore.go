// SPDX-License-Identifier: Apache-2.0

package repair

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"
)

// RestoreOptions configure a restore.
type RestoreOptions struct {
	// Probe makes the starting session retransmit its unacknowledged data, if it is a few segments, or send a probe
	// without data otherwise. The peer answers at once. This repairs a loss around the move within a round trip; the
	// kernel alone takes seconds. It costs the segments and an answer, and requires CAP_NET_RAW.
	Probe bool
}

// Built is a complete and still frozen session: it has sent nothing, and [Built.Close] is silent. After about a
// second, and then at growing intervals, the kernel retransmits the first unacknowledged segment, frozen or not. An
// owner elsewhere must be able to tolerate this.
type Built struct {
	// Lost lists, one sentence each, the features missing from this kernel: a congestion control, a socket option.
	// The session continues without them.
	Lost []string

	fd    int          // another descriptor of tcp's socket, for the next steps
	tcp   *net.TCPConn // set by Start
	state *State
	o     RestoreOptions
	tail  *tail // retransmits; nil: nothing to send, too much, or impossible
}

// Build creates a socket from a state, in the network namespace of the calling thread. The namespace must have the
// session's local address. If Build fails, it leaves nothing behind and has sent no packet. Its errors are or wrap
// [errInvalid], [ErrInUse], [errAddress], [errRoute], [errNoTLS], or are the kernel's.
func Build(s *State, o RestoreOptions) (_ *Built, err error) {
	if err := s.check(); err != nil {
		return nil, err
	}
	domain := unix.AF_INET6
	if s.Local.Addr().Is4() {
		domain = unix.AF_INET
	}
	fd, err := unix.Socket(domain, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_TCP)
	if err != nil {
		return nil, fmt.Errorf("restore %s: socket: %w", s.Flow(), err)
	}
	b := &Built{fd: fd, state: s, o: o}
	defer func() {
		if err != nil {
			err = fmt.Errorf("restore %s: %w", s.Flow(), err)
			b.Close()
		}
	}()
	// It also allows the bind beside a live listener. Setting SO_REUSEADDR later would revert that, so Start sets it
	// last.
	if err := setInt(fd, unix.IPPROTO_TCP, unix.TCP_REPAIR, repairOn); err != nil {
		return nil, explainRepair(err)
	}
	for _, step := range []func() error{b.prepare, b.connect, b.agree, b.fillSendQueue, b.finish, b.secure, b.openTail} {
		if err := step(); err != nil {
			return nil, err
		}
	}
	return b, nil
}

// Close ends the session without a packet: in repair mode close(2) is silent.
func (b *Built) Close() error {
	if b.fd < 0 {
		return nil
	}
	err := unix.Close(b.fd)
	b.fd = -1
	if b.tail != nil {
		b.tail.close()
	}
	if b.tcp != nil {
		err = errors.Join(err, b.tcp.Close())
	}
	return err
}

// prepare sets the options required before the connection exists.
func (b *Built) prepare() error {
	s := b.state
	lost, err := s.setOptions(b.fd, true)
	b.Lost = append(b.Lost, lost...)
	if err != nil {
		return err
	}
	if s.Device != "" {
		if err := unix.BindToDevice(b.fd, s.Device); err != nil {
			return fmt.Errorf("bind to the session's interface %q (set State.Device to its name here, or clear it): %w", s.Device, err)
		}
	}
	if s.Congestion != "" {
		err := unix.SetsockoptString(b.fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, s.Congestion)
		if errors.Is(err, unix.ENOENT) {
			b.Lost = append(b.Lost, fmt.Sprintf("congestion control %s: missing in this kernel, using its default", s.Congestion))
		} else if err != nil {
			return fmt.Errorf("set congestion control %s: %w", s.Congestion, err)
		}
	}
	// The announced window must fit before connect(2) derives its limits.
	if err := b.sizeBuffer(unix.SO_RCVBUF, unix.SO_RCVBUFFORCE, s.RcvBuf, s.RcvBufLocked, false); err != nil {
		return err
	}
	return b.lockBuffers(s.RcvBufLocked, false)
}

// sizeBuffer restores a buffer's size. The kernel treats a set size as locked. lockBuffers unlocks it if the kernel
// can (Linux 5.14). Otherwise an automatic buffer is only set if it is too small, or was enlarged here.
func (b *Built) sizeBuffer(opt, force int, size uint32, locked, enlarged bool) error {
	now, err := unix.GetsockoptInt(b.fd, unix.SOL_SOCKET, opt)
	if err != nil {
		return fmt.Errorf("read the size of a buffer: %w", err)
	}
	if !locked && (now == int(size) || now > int(size) && !enlarged && !b.canUnlock()) {
		return nil
	}
	if err := setInt(b.fd, unix.SOL_SOCKET, force, int(size/2)); err != nil { // the kernel doubles it
		return fmt.Errorf("set a buffer to %d bytes: %w", size, err)
	}
	if !locked && !b.canUnlock() {
		b.Lost = append(b.Lost, fmt.Sprintf("a buffer of %d bytes keeps that size: SO_BUF_LOCK needs Linux 5.14", size))
	}
	return nil
}

func (b *Built) canUnlock() bool {
	_, err := unix.GetsockoptInt(b.fd, unix.SOL_SOCKET, soBufLock)
	return err == nil
}

// lockBuffers sets the locks of both buffers. Setting a size has locked it.
func (b *Built) lockBuffers(rcv, snd bool) error {
	locks := 0
	if rcv {
		locks |= lockRcvBuf
	}
	if snd {
		locks |= lockSndBuf
	}
	if err := setInt(b.fd, unix.SOL_SOCKET, soBufLock, locks); err != nil && !absent(err) {
		return fmt.Errorf("set SO_BUF_LOCK: %w", err)
	}
	return nil
}

// connect binds and connects with the session's sequence numbers. In repair mode it sends nothing.
func (b *Built) connect() error {
	s := b.state
	local, err := sockaddr(b.fd, s, s.Local)
	if err != nil {
		return err
	}
	remote, err := sockaddr(b.fd, s, s.Remote)
	if err != nil {
		return err
	}
	if err := unix.Bind(b.fd, local); errors.Is(err, unix.EADDRNOTAVAIL) {
		return fmt.Errorf("%w: %s", errAddress, s.Local.Addr())
	} else if err != nil {
		return fmt.Errorf("bind: %w", err)
	}
	if err := setQueueSeq(b.fd, queueRecv, s.RcvNxt); err != nil {
		return err
	}
	if err := setQueueSeq(b.fd, queueSend, s.SndUna); err != nil {
		return err
	}
	// connect(2) computes the segment size now, and not again when the option changes. Without this the session would
	// use segments of 536 bytes until the next path MTU check. (The kernel accepts 88 to 32767 here.)
	if s.MSS >= 88 && s.MSS <= 32767 {
		if err := setInt(b.fd, unix.IPPROTO_TCP, unix.TCP_MAXSEG, int(s.MSS)); err != nil {
			return fmt.Errorf("set TCP_MAXSEG: %w", err)
		}
		defer func() { _ = setInt(b.fd, unix.IPPROTO_TCP, unix.TCP_MAXSEG, 0) }() // it has served its purpose, and is no limit of the application
	}
	switch err := unix.Connect(b.fd, remote); {
	case errors.Is(err, unix.EADDRNOTAVAIL):
		return ErrInUse
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EHOSTUNREACH):
		return fmt.Errorf("%w %s: %w", errRoute, s.Remote.Addr(), err)
	case err != nil:
		return fmt.Errorf("connect: %w", err)
	}
	return nil
}

// sockaddr returns an end of a session, for its socket or another one in its network namespace.
func sockaddr(fd int, s *State, a netip.AddrPort) (unix.Sockaddr, error) {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}, nil
	}
	sa := &unix.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())}
	if a.Addr().IsLinkLocalUnicast() {
		if s.Zone == "" { // the case if only one end is link-local
			return nil, fmt.Errorf("the interface of %s is unknown: set State.Zone", a.Addr())
		}
		index, err := deviceIndex(fd, s.Zone)
		if err != nil {
			return nil, err
		}
		sa.ZoneId = uint32(index)
	}
	return sa, nil
}

// agreed is struct tcp_repair_opt (linux/tcp.h).
type agreed struct{ code, value uint32 }

// TCP option kinds (RFC 9293, 7323, 2018).
const (
	kindMSS        = 2
	kindScale      = 3
	kindSACK       = 4
	kindTimestamps = 8
)

// agree sets the options negotiated at the session's start. It must precede the queues, because their segmentation
// depends on it.
func (b *Built) agree() error {
	s := b.state
	// Zero scales are set even without negotiated scaling. They are the same on the wire, and replace the kernel's
	// default scale.
	list := []agreed{{kindMSS, uint32(s.MSS)}, {kindScale, uint32(s.SndScale) | uint32(s.RcvScale)<<16}}
	if s.SACK {
		list = append(list, agreed{kindSACK, 0})
	}
	if s.Timestamps {
		list = append(list, agreed{kindTimestamps, 0})
	}
	if err := setTCP(b.fd, unix.TCP_REPAIR_OPTIONS, &list[0], len(list)); err != nil {
		return fmt.Errorf("set TCP_REPAIR_OPTIONS: %w", err)
	}
	if !s.Timestamps {
		return nil
	}
	// Bit 0 selects the clock, since Linux 6.7. The dump may have changed it, so the value may be a tick behind the
	// last sent one. The peer would drop such a packet as old (RFC 7323, PAWS).
	ts := (s.Timestamp + 3) &^ 1
	if s.Microseconds {
		ts |= 1
	}
	if err := setTCP(b.fd, unix.TCP_TIMESTAMP, &ts, 1); err != nil {
		return fmt.Errorf("set TCP_TIMESTAMP: %w", err)
	}
	return nil
}

// finish sets the windows and the remaining options.
func (b *Built) finish() error {
	s := b.state
	if err := setInt(b.fd, unix.IPPROTO_TCP, unix.TCP_REPAIR_QUEUE, queueNone); err != nil {
		return fmt.Errorf("select no queue: %w", err)
	}
	if err := setTCP(b.fd, unix.TCP_REPAIR_WINDOW, &s.Window, 1); err != nil {
		return fmt.Errorf("set TCP_REPAIR_WINDOW: %w", err)
	}
	lost, err := s.setOptions(b.fd, false)
	b.Lost = append(b.Lost, lost...)
	if err != nil {
		return err
	}
	if s.Linger >= 0 {
		if err := unix.SetsockoptLinger(b.fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1, Linger: int32(s.Linger)}); err != nil {
			return fmt.Errorf("set SO_LINGER: %w", err)
		}
	}
	return nil
}

// Start continues the session here, and sends the unsent data. The session may reach the peer from the first step on.
// If Start fails, the session has ended with an RST, and must not be restored elsewhere.
func (b *Built) Start() (*Conn, error) {
	if err := b.begin(b.goConn, b.start); err != nil {
		return nil, err
	}
	c := &Conn{TCPConn: b.tcp, unread: b.state.Unread, Lost: b.Lost}
	b.tcp = nil // the caller owns it now
	return c, b.Close()
}

// StartFD is Start for a caller with a duplicate of [Built.FD]. The session continues on that duplicate.
func (b *Built) StartFD() error {
	if err := b.begin(b.start); err != nil {
		return err
	}
	return b.Close()
}

func (b *Built) begin(steps ...func() error) error {
	if b.fd < 0 {
		return fmt.Errorf("start %s: %w", b.state.Flow(), net.ErrClosed)
	}
	for _, step := range steps {
		if err := step(); err != nil {
			_ = thaw(b.fd, false, repairOffQuiet)                                                    // in repair mode closing would be silent
			_ = unix.SetsockoptLinger(b.fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}) // makes close send an RST
			b.Close()
			return fmt.Errorf("start %s: %w", b.state.Flow(), err)
		}
	}
	return nil
}

func (b *Built) start() error {
	s, how := b.state, repairOffQuiet
	if b.o.Probe && b.tail == nil {
		how = repairOff
	}
	if err := thaw(b.fd, s.ReuseAddr, how); err != nil {
		return err
	}
	if b.tail != nil && b.tail.send(b.fd, s) != nil { // a full queue, a firewall, a smaller path MTU
		if err := thaw(b.fd, s.ReuseAddr, repairOff); err != nil {
			return err
		}
	}
	if err := sendAll(b.fd, s.Send[len(s.Send)-s.Unsent:]); err != nil {
		return fmt.Errorf("send the unsent data: %w", err)
	}
	if err := b.sizeBuffer(unix.SO_SNDBUF, unix.SO_SNDBUFFORCE, s.SndBuf, s.SndBufLocked, len(s.Send) > 0); err != nil {
		return err
	}
	if err := b.lockBuffers(s.RcvBufLocked, s.SndBufLocked); err != nil {
		return err
	}
	if s.Fin {
		if err := unix.Shutdown(b.fd, unix.SHUT_WR); err != nil {
			return fmt.Errorf("shut down sending again: %w", err)
		}
	}
	if s.EOF {
		// ENOTCONN: the peer has answered our FIN in the meantime, and the session is over.
		if err := unix.Shutdown(b.fd, unix.SHUT_RD); err != nil && !errors.Is(err, unix.ENOTCONN) {
			return fmt.Errorf("shut down receiving again: %w", err)
		}
	}
	return nil
}

// goConn wraps the socket in a net.TCPConn. Package net sets TCP_NODELAY and keepalive, so the session's options are
// set again.
func (b *Built) goConn() error {
	dup, err := unix.FcntlInt(uintptr(b.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("duplicate the descriptor: %w", err)
	}
	f := os.NewFile(uintptr(dup), "session")
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return err
	}
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		c.Close()
		return fmt.Errorf("the socket is a %T", c)
	}
	b.tcp = tcp
	_, err = b.state.setOptions(b.fd, false) // Lost lists missing options already
	return err
}
