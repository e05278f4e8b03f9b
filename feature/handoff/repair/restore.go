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

// RestoreOptions say how a session is restored.
type RestoreOptions struct {
	// Probe has the session, when it starts, send again what the peer has not acknowledged,
	// if that is a few segments, and else one without data. The peer answers at once with what
	// it has. It heals a loss around the move in a round trip, for which the kernel alone
	// takes seconds, and costs those segments and an answer. It takes CAP_NET_RAW.
	Probe bool
}

// Built is a session that is complete, and still frozen: nothing has left it, and its
// end ([Built.Close]) is silent. After a second or so, and then at growing intervals, the kernel sends
// the first segment that is not acknowledged again, frozen or not: whoever owns the session elsewhere must not be
// disturbed by that.
type Built struct {
	// Lost tells in a sentence each what the session goes on without, since this
	// kernel does not have it: a congestion control, a socket option.
	Lost []string

	fd    int          // another descriptor of tcp's socket, for what follows
	tcp   *net.TCPConn // from Start on
	state *State
	o     RestoreOptions
	tail  *tail // sends again what was sent; nil: there is nothing, too much, or no way
}

// Build makes a socket of a state in the network namespace of the calling thread,
// in which the session's own address must be. If it fails, nothing is left behind and
// no packet was sent. Its errors are or wrap [errInvalid], [ErrInUse], [errAddress],
// [errRoute], [errNoTLS], or are those of the kernel.
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
	// It also lets the bind pass beside a live listener. SO_REUSEADDR after it would
	// take that away, so that Start sets it last.
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

// Close ends the session without a packet: under repair close(2) is silent.
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

// prepare sets what must be there before the connection is.
func (b *Built) prepare() error {
	s := b.state
	lost, err := s.setOptions(b.fd, true)
	b.Lost = append(b.Lost, lost...)
	if err != nil {
		return err
	}
	if s.Device != "" {
		if err := unix.BindToDevice(b.fd, s.Device); err != nil {
			return fmt.Errorf("bind to interface %q, as the session was (change or clear State.Device if it is called otherwise here): %w", s.Device, err)
		}
	}
	if s.Congestion != "" {
		err := unix.SetsockoptString(b.fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, s.Congestion)
		if errors.Is(err, unix.ENOENT) {
			b.Lost = append(b.Lost, fmt.Sprintf("congestion control %s: not in this kernel, which goes on with its own", s.Congestion))
		} else if err != nil {
			return fmt.Errorf("set congestion control %s: %w", s.Congestion, err)
		}
	}
	// The window that was announced must fit, before connect(2) derives its limits.
	if err := b.sizeBuffer(unix.SO_RCVBUF, unix.SO_RCVBUFFORCE, s.RcvBuf, s.RcvBufLocked, false); err != nil {
		return err
	}
	return b.lockBuffers(s.RcvBufLocked, false)
}

// sizeBuffer gives a buffer its size back. The kernel takes a size that was set for
// one to keep, which lockBuffers undoes where it can (Linux 5.14); where it cannot, a
// buffer that grew by itself is only touched if it is too small, or was made larger here.
func (b *Built) sizeBuffer(opt, force int, size uint32, locked, enlarged bool) error {
	now, err := unix.GetsockoptInt(b.fd, unix.SOL_SOCKET, opt)
	if err != nil {
		return fmt.Errorf("size of a buffer: %w", err)
	}
	if !locked && (now == int(size) || now > int(size) && !enlarged && !b.canUnlock()) {
		return nil
	}
	if err := setInt(b.fd, unix.SOL_SOCKET, force, int(size/2)); err != nil { // the kernel doubles it
		return fmt.Errorf("give a buffer its %d bytes: %w", size, err)
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

// lockBuffers says which buffers have a fixed size; setting one has locked it.
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

// connect binds and connects, which under repair sends nothing, from the sequence
// numbers on that the session had.
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
	// The size of segments is worked out now, and not again when the option is set: without
	// this the session would go on in segments of 536 bytes until something has it look at
	// the path. (The kernel takes 88 to 32767 here.)
	if s.MSS >= 88 && s.MSS <= 32767 {
		if err := setInt(b.fd, unix.IPPROTO_TCP, unix.TCP_MAXSEG, int(s.MSS)); err != nil {
			return fmt.Errorf("set TCP_MAXSEG: %w", err)
		}
		defer func() { _ = setInt(b.fd, unix.IPPROTO_TCP, unix.TCP_MAXSEG, 0) }() // it has done its work: no limit of the application's
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

// sockaddr is an end of a session, for its socket or another one of its network namespace.
func sockaddr(fd int, s *State, a netip.AddrPort) (unix.Sockaddr, error) {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}, nil
	}
	sa := &unix.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())}
	if a.Addr().IsLinkLocalUnicast() {
		if s.Zone == "" { // so it is where only one end is link-local
			return nil, fmt.Errorf("the interface of %s is not known: set State.Zone to it", a.Addr())
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

// Codes of TCP options (RFC 9293, 7323, 2018).
const (
	kindMSS        = 2
	kindScale      = 3
	kindSACK       = 4
	kindTimestamps = 8
)

// agree sets what the two ends agreed on when the session began. It must come before
// the queues: they are cut into segments by it.
func (b *Built) agree() error {
	s := b.state
	// Scales of zero are set also where scaling was not agreed on: that is the same on
	// the wire, and without it the kernel would scale by its own default.
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
	// Bit 0 says which clock, since Linux 6.7, and was cleared or set by the dump. So the
	// value may be a tick behind what the session sent last, which the peer would
	// take for an old packet (RFC 7323, PAWS).
	ts := (s.Timestamp + 3) &^ 1
	if s.Microseconds {
		ts |= 1
	}
	if err := setTCP(b.fd, unix.TCP_TIMESTAMP, &ts, 1); err != nil {
		return fmt.Errorf("set TCP_TIMESTAMP: %w", err)
	}
	return nil
}

// finish sets the windows and what else a connection may have.
func (b *Built) finish() error {
	s := b.state
	if err := setInt(b.fd, unix.IPPROTO_TCP, unix.TCP_REPAIR_QUEUE, queueNone); err != nil {
		return fmt.Errorf("choose no queue: %w", err)
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

// Start has the session go on here, and sends what was not sent yet. From the first
// line on it may be alive at the peer: if Start fails, the session has ended with a
// reset, and is not to be restored elsewhere.
func (b *Built) Start() (*Conn, error) {
	if err := b.begin(b.goConn, b.start); err != nil {
		return nil, err
	}
	c := &Conn{TCPConn: b.tcp, unread: b.state.Unread, Lost: b.Lost}
	b.tcp = nil // it is the caller's now
	return c, b.Close()
}

// StartFD is Start for who has a duplicate of [Built.FD]: it goes on by that.
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
			_ = thaw(b.fd, false, repairOffQuiet)                                                    // under repair nobody would hear of it
			_ = unix.SetsockoptLinger(b.fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}) // the peer is to know
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
	if b.tail != nil && b.tail.send(b.fd, s) != nil { // a full queue, a firewall, a path that takes less
		if err := thaw(b.fd, s.ReuseAddr, repairOff); err != nil {
			return err
		}
	}
	if err := sendAll(b.fd, s.Send[len(s.Send)-s.Unsent:]); err != nil {
		return fmt.Errorf("send the rest: %w", err)
	}
	if err := b.sizeBuffer(unix.SO_SNDBUF, unix.SO_SNDBUFFORCE, s.SndBuf, s.SndBufLocked, len(s.Send) > 0); err != nil {
		return err
	}
	if err := b.lockBuffers(s.RcvBufLocked, s.SndBufLocked); err != nil {
		return err
	}
	if s.Fin {
		if err := unix.Shutdown(b.fd, unix.SHUT_WR); err != nil {
			return fmt.Errorf("end the own direction again: %w", err)
		}
	}
	if s.EOF {
		// ENOTCONN: the peer has answered to our FIN meanwhile, and all is over.
		if err := unix.Shutdown(b.fd, unix.SHUT_RD); err != nil && !errors.Is(err, unix.ENOTCONN) {
			return fmt.Errorf("end the peer's direction again: %w", err)
		}
	}
	return nil
}

// goConn hands the socket to Go, which sets TCP_NODELAY and keepalive as it likes:
// the session's own options are set again after it.
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
	_, err = b.state.setOptions(b.fd, false) // what is missing was told
	return err
}
