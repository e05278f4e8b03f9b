// SPDX-License-Identifier: Apache-2.0

package pidfd

import "golang.org/x/sys/unix"

// CloseDup closes a descriptor made by [Process.Dup] without waiting. It closes a listener or UDP
// socket at once, and anything else in another thread. Meanwhile the process may have turned a
// listener into a connection with SO_LINGER, or replaced it by a file of its own file system. The
// last close of either may wait.
func CloseDup(fd int) {
	kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
	if err == nil && kind == unix.SOCK_STREAM {
		kind, err = unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
		if err == nil && kind == 0 {
			_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{}) // no effect on a Unix socket
			go unix.Close(fd)
			return
		}
	}
	if err == unix.EBADF {
		return
	}
	if err != nil { // not a socket
		go unix.Close(fd)
		return
	}
	unix.Close(fd)
}
