// SPDX-License-Identifier: Apache-2.0

package sock

import "golang.org/x/sys/unix"

// soPeekOff is SO_PEEK_OFF of linux/socket.h. TCP has it since Linux 6.9.
const soPeekOff = 42

// Inline makes an urgent byte (MSG_OOB) part of the stream, as RFC 6093 recommends. Without it the kernel counts the byte as
// received and no read returns it: the positions of the session disagree for good. A listener passes the option on to its
// connections. Set it before the first read.
//
// A read or a peek that has bytes stops at the newest urgent byte, the mark. The next one goes on if it begins there.
func Inline(fd int) {
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_OOBINLINE, 1) // fails for other sockets than TCP's: they have no urgent byte
}

// IsInline says whether [Inline] was called for a socket.
func IsInline(fd int) bool {
	v, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_OOBINLINE)
	return err == nil && v != 0
}

// ResetPeek makes peeks begin at the queue's begin again. A process that was killed while it looked behind a mark with
// SO_PEEK_OFF has left the offset in the socket.
func ResetPeek(fd int) {
	if off, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, soPeekOff); err == nil && off >= 0 {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, soPeekOff, -1) // a kernel that tells the offset can set it
	}
}

// Queued is the number of bytes in the receive queue. Without [Inline] bytes behind an urgent one are not counted.
func Queued(fd int) (int, error) { return unix.IoctlGetInt(fd, unix.SIOCINQ) }

// Peek copies the receive queue's head to p, without waiting. It stops at an urgent mark behind the first byte.
func Peek(fd int, p ...[]byte) (int, error) {
	var tries atMark
	for {
		n, _, _, _, err := unix.RecvmsgBuffers(fd, p, nil, unix.MSG_PEEK|unix.MSG_DONTWAIT)
		if err == unix.EINTR || err == unix.EAGAIN && tries.again(fd) {
			continue
		}
		return max(n, 0), err
	}
}

// PeekAll copies the receive queue's head to p, without waiting, past urgent marks. It returns fewer bytes than are queued only
// where p is full, or where TCP has no SO_PEEK_OFF. Nobody else may read or peek meanwhile.
func PeekAll(fd int, p []byte) (n int, err error) {
	n, err = Peek(fd, p)
	for n > 0 && n < len(p) && err == nil {
		queued, qerr := Queued(fd)
		if qerr != nil || queued <= n || unix.SetsockoptInt(fd, unix.SOL_SOCKET, soPeekOff, n) != nil {
			return n, nil
		}
		var more int
		more, err = Peek(fd, p[n:])
		ResetPeek(fd)
		if err == unix.EAGAIN || err == nil && more == 0 {
			return n, nil
		}
		n += more
	}
	return n, err
}

// PassesMarks says whether [PeekAll] passes an urgent mark on this kernel.
func PassesMarks(fd int) bool {
	off, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, soPeekOff)
	return err == nil && unix.SetsockoptInt(fd, unix.SOL_SOCKET, soPeekOff, off) == nil
}

// atMark counts EAGAINs of reads that begin at an urgent mark: the kernel returns one, with bytes queued, where a signal is
// pending (tcp_recvmsg_locked), and Go preempts goroutines with signals.
type atMark int

// maxAtMark bounds the tries. A kTLS socket whose record is incomplete says EAGAIN at a mark every time.
const maxAtMark = 100

// again says whether to read again.
func (t *atMark) again(fd int) bool {
	if *t++; *t > maxAtMark {
		return false
	}
	at, err := unix.IoctlGetInt(fd, unix.SIOCATMARK)
	if err != nil || at == 0 {
		return false
	}
	n, err := Queued(fd)
	return err == nil && n > 0
}
