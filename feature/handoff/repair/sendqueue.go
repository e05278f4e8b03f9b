// SPDX-License-Identifier: Apache-2.0

package repair

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// fillSendQueue restores the sent data: in repair mode a write queues it as sent.
func (b *Built) fillSendQueue() error {
	s := b.state
	if len(s.Send) == 0 {
		return nil
	}
	// The kernel accounts a queue with several times its bytes, and doubles the given size. Start restores the size.
	// Otherwise the session would grow with every move.
	room := max(int(s.SndBuf/2), 2*len(s.Send)+64<<10)
	if err := setInt(b.fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, room); err != nil {
		return fmt.Errorf("enlarge the send buffer for %d bytes: %w", len(s.Send), err)
	}
	sent := s.Send[:len(s.Send)-s.Unsent]
	if len(sent) == 0 {
		return nil
	}
	if err := setInt(b.fd, unix.IPPROTO_TCP, unix.TCP_REPAIR_QUEUE, queueSend); err != nil {
		return fmt.Errorf("select the send queue: %w", err)
	}
	if err := sendAll(b.fd, sent); err != nil {
		return fmt.Errorf("fill the send queue: %w", err)
	}
	l, err := queueLengths(b.fd)
	if err == nil && (l.unacked != len(sent) || l.unsent != 0) {
		err = fmt.Errorf("the kernel queued %d bytes of %d, %d of them as unsent", l.unacked, len(sent), l.unsent)
	}
	return err
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
