// SPDX-License-Identifier: Apache-2.0

package repair

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/sock"
)

// readStays reads the constant state except the addresses: it does not change while only the kernel uses the socket.
func (s *State) readStays(fd int) error {
	reuse, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR) // entering and leaving repair mode overwrites it
	if err != nil {
		return fmt.Errorf("read SO_REUSEADDR: %w", err)
	}
	s.ReuseAddr = reuse != 0
	for _, step := range []func(int) error{s.readOptions, s.readSocket} {
		if err := step(fd); err != nil {
			return err
		}
	}
	return nil
}

// read reads the rest of the state from a socket in repair mode. At the end it compares: a change means packets
// arrived that should have been blocked.
func (s *State) read(fd, limit int) error {
	i, err := tcpInfo(fd)
	if err != nil {
		return err
	}
	if !movable(i.State) {
		return fmt.Errorf("%w: %s", errState, stateName(i.State))
	}
	before, err := queueLengths(fd)
	if err != nil {
		return err
	}
	if err := tooLarge(before.unread+before.unacked, limit); err != nil {
		return err
	}
	if err := s.readBuffers(fd); err != nil {
		return err
	}
	if err := s.readTCP(fd, i); err != nil {
		return err
	}
	if s.TLS != nil { // before the queues, which are unreadable under TLS: they must be empty
		if err := s.readTLS(fd); err != nil {
			return err
		}
	}
	if err := s.readQueues(fd, i.State, before); err != nil {
		return err
	}
	if err := s.checkStill(fd, i.State, before); err != nil {
		return err
	}
	return s.check()
}

// checkStill compares the socket with the first reading.
func (s *State) checkStill(fd int, state uint8, before lengths) error {
	rcv, err := queueSeq(fd, queueRecv)
	if err != nil {
		return err
	}
	i, err := tcpInfo(fd)
	if err != nil {
		return err
	}
	after, err := queueLengths(fd)
	if err != nil {
		return err
	}
	if rcv != s.RcvNxt || i.State != state || after.unread != before.unread || after.unacked != before.unacked {
		return errMoving
	}
	if s.TLS != nil {
		if err := s.TLS.still(fd); err != nil {
			return err
		}
	}
	return setInt(fd, unix.IPPROTO_TCP, unix.TCP_REPAIR_QUEUE, queueNone)
}

// readSocket reads state other than plain-number options.
func (s *State) readSocket(fd int) (err error) {
	if s.Congestion, err = unix.GetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION); err != nil {
		return fmt.Errorf("read TCP_CONGESTION: %w", err)
	}
	if s.Device, err = unix.GetsockoptString(fd, unix.SOL_SOCKET, unix.SO_BINDTODEVICE); err != nil {
		return fmt.Errorf("read SO_BINDTODEVICE: %w", err)
	}
	linger, err := getLinger(fd)
	if err != nil {
		return err
	}
	s.Linger = linger
	locks, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, soBufLock)
	if err != nil && !absent(err) {
		return fmt.Errorf("read SO_BUF_LOCK: %w", err)
	}
	s.SndBufLocked, s.RcvBufLocked = locks&lockSndBuf != 0, locks&lockRcvBuf != 0
	return nil
}

// readBuffers reads the sizes of the buffers. They grow while packets arrive.
func (s *State) readBuffers(fd int) error {
	for _, b := range []struct {
		opt int
		to  *uint32
	}{{unix.SO_SNDBUF, &s.SndBuf}, {unix.SO_RCVBUF, &s.RcvBuf}} {
		n, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, b.opt)
		if err != nil {
			return fmt.Errorf("read the size of a buffer: %w", err)
		}
		*b.to = uint32(n)
	}
	return nil
}

// readTCP reads the negotiated options and the windows.
func (s *State) readTCP(fd int, i info) error {
	// In repair mode this is the peer's limit, without the path's.
	mss, err := unix.GetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_MAXSEG)
	if err != nil {
		return fmt.Errorf("read TCP_MAXSEG: %w", err)
	}
	s.MSS = uint16(min(mss, 1<<16-1))
	s.SACK = i.Options&optionSACK != 0
	if s.Timestamps = i.Options&optionTimestamps != 0; s.Timestamps {
		s.Microseconds = i.Options&optionMicrosec != 0
		if err := getTCP(fd, unix.TCP_TIMESTAMP, &s.Timestamp); err != nil {
			return fmt.Errorf("read TCP_TIMESTAMP: %w", err)
		}
	}
	if s.Scaling = i.Options&optionScaling != 0; s.Scaling {
		s.SndScale, s.RcvScale = i.scales()
	}
	if err := getTCP(fd, unix.TCP_REPAIR_WINDOW, &s.Window); err != nil {
		return fmt.Errorf("read TCP_REPAIR_WINDOW: %w", err)
	}
	return nil
}

// readQueues reads the data in flight, in both directions. The socket's own FIN has the last sequence number of the
// send queue, but is not a byte of it.
func (s *State) readQueues(fd int, state uint8, l lengths) (err error) {
	if s.RcvNxt, err = queueSeq(fd, queueRecv); err != nil {
		return err
	}
	if s.Unread, err = peek(fd, l.unread, sock.PeekAll); err != nil {
		return fmt.Errorf("peek at unread data: %w", err)
	}
	switch state {
	case stateCloseWait, stateLastAck, stateClosing:
		s.EOF = true
	default:
		s.EOF, err = readShutdown(fd)
	}
	if err != nil {
		return err
	}
	end, err := queueSeq(fd, queueSend)
	if err != nil {
		return err
	}
	s.SndUna, s.Unsent = end-uint32(l.unacked), l.unsent
	data := l.unacked
	switch state {
	case stateFinWait1, stateLastAck, stateClosing:
		s.Fin = true
		data--
		s.Unsent = max(0, s.Unsent-1) // an unsent FIN
	case stateFinWait2:
		// The FIN is sent and acknowledged again: there is no other way into this state.
		s.Fin = true
		s.SndUna--
	}
	if s.Send, err = peek(fd, data, func(fd int, b []byte) (int, error) { return sock.Peek(fd, b) }); err != nil {
		return fmt.Errorf("peek at unacknowledged data: %w", err)
	}
	return nil
}

// slack is room for a partially acknowledged segment of the send queue: the kernel copies it from its start.
const slack = 64 << 10

// peek returns the last n bytes of the selected queue. copy reads it from its start.
func peek(fd, n int, copy func(fd int, b []byte) (int, error)) ([]byte, error) {
	if n == 0 {
		return nil, nil
	}
	b := make([]byte, n+slack)
	m, err := copy(fd, b)
	if err != nil {
		return nil, err
	}
	if m < n || m == len(b) {
		return nil, fmt.Errorf("%w: the queue holds %d bytes, not %d", errMoving, m, n)
	}
	return b[m-n : m : m], nil
}

// readShutdown reports whether reading was shut down. It is for connections without a FIN of the peer.
func readShutdown(fd int) (bool, error) {
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
	for {
		_, err := unix.Poll(p, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		return p[0].Revents&unix.POLLRDHUP != 0, err
	}
}
