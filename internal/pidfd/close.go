// SPDX-License-Identifier: Apache-2.0

package pidfd

import "golang.org/x/sys/unix"

// CloseDup closes a descriptor that [Process.Dup] made. It never waits: a listener or UDP socket is closed at once, and anything
// else by another thread. The process can have made a connection of a listener meanwhile, whose SO_LINGER makes the last close
// wait, or have put a file of a file system of its own in its place.
func CloseDup(fd int) {
	kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
	if err == nil && kind == unix.SOCK_STREAM {
		kind, err = unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
		if err == nil && kind == 0 {
			_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{}) // of a Unix socket: it has none
			go unix.Close(fd)
			return
		}
	}
	if err == unix.EBADF {
		return
	}
	if err != nil { // no socket
		go unix.Close(fd)
		return
	}
	unix.Close(fd)
}
