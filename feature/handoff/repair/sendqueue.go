// SPDX-License-Identifier: Apache-2.0

package repair

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// fillSendQueue puts back what was sent: under repair that queues it as sent.
func (b *Built) fillSendQueue() error {
	s := b.state
	if len(s.Send) == 0 {
		return nil
	}
	// The kernel accounts a queue with up to several times its bytes (and doubles what
	// it is told). Start takes the size back, or the session would grow with every move.
	room := max(int(s.SndBuf/2), 2*len(s.Send)+64<<10)
	if err := setInt(b.fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, room); err != nil {
		return fmt.Errorf("make room for %d bytes to be sent: %w", len(s.Send), err)
	}
	sent := s.Send[:len(s.Send)-s.Unsent]
	if len(sent) == 0 {
		return nil
	}
	if err := setInt(b.fd, unix.IPPROTO_TCP, unix.TCP_REPAIR_QUEUE, queueSend); err != nil {
		return fmt.Errorf("choose the send queue: %w", err)
	}
	last := len(sent)
	if b.o.Probe {
		i, err := tcpInfo(b.fd)
		if err != nil {
			return err
		}
		last = max(0, last-int(i.SndMSS))
	}
	if err := sendAll(b.fd, sent[:last]); err != nil {
		return fmt.Errorf("queue what was sent: %w", err)
	}
	free, err := b.maySend(len(sent))
	if err != nil {
		return err
	}
	if last < len(sent) && free {
		b.again = len(sent) - last
	} else if err := sendAll(b.fd, sent[last:]); err != nil {
		return fmt.Errorf("queue what was sent: %w", err)
	}
	l, err := queueLengths(b.fd)
	if err == nil && (l.unacked != len(sent)-b.again || l.unsent != 0) {
		err = fmt.Errorf("the kernel queued %d bytes of %d, %d of them as unsent", l.unacked, len(sent)-b.again, l.unsent)
	}
	return err
}

// maySend tells whether a segment could leave at once that ends the given number of
// bytes after what the peer has acknowledged. It must: acknowledgements of what the kernel
// takes for unsent are thrown away, and the peer may have all of it.
func (b *Built) maySend(end int) (bool, error) {
	i, err := tcpInfo(b.fd)
	return i.Unacked+1 < i.SndCwnd && uint32(end) <= b.state.Window.SndWnd, err
}

// sendAgain sends the last segment again. TCP_NODELAY has it go out now, whatever
// TCP_CORK and Nagle's algorithm would have it wait for.
func (b *Built) sendAgain() error {
	s := b.state
	sent := len(s.Send) - s.Unsent
	if err := sendAll(b.fd, s.Send[sent-b.again:sent]); err != nil {
		return fmt.Errorf("send the last segment again: %w", err)
	}
	was, err := unix.GetsockoptInt(b.fd, unix.IPPROTO_TCP, unix.TCP_NODELAY)
	if err == nil {
		err = setInt(b.fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	}
	if err == nil && was == 0 {
		err = setInt(b.fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 0)
	}
	if err != nil {
		return fmt.Errorf("push the last segment: %w", err)
	}
	return nil
}

func sendAll(fd int, b []byte) error {
	for chunk := len(b); len(b) > 0; {
		n, err := unix.SendmsgN(fd, b[:min(len(b), chunk)], nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EAGAIN) && chunk > 1024:
			chunk /= 2
		case err != nil:
			return fmt.Errorf("%d bytes left: %w", len(b), err)
		default:
			b = b[n:]
		}
	}
	return nil
}
