// SPDX-License-Identifier: Apache-2.0

package sock

import "golang.org/x/sys/unix"

// soPeekOff is SO_PEEK_OFF of linux/socket.h. TCP supports it since Linux 6.9.
const soPeekOff = 42

// Inline makes an urgent byte (MSG_OOB) part of the stream, as RFC 6093 recommends. Otherwise the
// kernel counts the byte as received, but no read returns it, and the session's positions stay
// inconsistent. Connections inherit the option from their listener. Set it before the first read.
//
// A read or a peek with data stops at the newest urgent byte, the mark. A read beginning at the
// mark continues past it.
func Inline(fd int) {
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_OOBINLINE, 1) // fails for other sockets than TCP's: they have no urgent byte
}

// IsInline reports whether [Inline] is set for a socket.
func IsInline(fd int) bool {
	v, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_OOBINLINE)
	return err == nil && v != 0
}

// ResetPeek makes peeks begin at the head of the queue again. A process killed during PeekAll
// leaves its SO_PEEK_OFF offset in the socket.
func ResetPeek(fd int) {
	if off, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, soPeekOff); err == nil && off >= 0 {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, soPeekOff, -1) // a kernel with a readable offset can set it
	}
}

// Queued returns the number of bytes in the receive queue. Without [Inline] it does not count bytes
// after an urgent one.
func Queued(fd int) (int, error) { return unix.IoctlGetInt(fd, unix.SIOCINQ) }

// Peek copies the head of the receive queue to p without blocking. It stops at an urgent mark after
// the first byte.
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

// PeekAll copies the head of the receive queue to p without blocking, past urgent marks. It returns
// fewer bytes than are queued only if p is full, or if TCP has no SO_PEEK_OFF. Nobody else may read
// or peek meanwhile.
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

// PassesMarks reports whether [PeekAll] passes urgent marks on this kernel.
func PassesMarks(fd int) bool {
	off, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, soPeekOff)
	return err == nil && unix.SetsockoptInt(fd, unix.SOL_SOCKET, soPeekOff, off) == nil
}

// atMark counts failed reads at an urgent mark. The kernel returns EAGAIN there in spite of queued
// bytes if a signal is pending (tcp_recvmsg_locked). Go preempts goroutines with signals.
type atMark int

// maxAtMark bounds the retries. A kTLS socket with an incomplete record returns EAGAIN at a mark
// every time.
const maxAtMark = 100

// again reports whether to retry the read.
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
