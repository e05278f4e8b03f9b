// SPDX-License-Identifier: Apache-2.0

package sock

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// one is an address to give with a length: x/sys has no recv with one and without memory.
var one byte

// truncate is recv(fd, …, n, MSG_TRUNC): at most n bytes of a TCP socket's queue are
// thrown away. Nothing is written to memory (tcp_recvmsg_locked copies unless MSG_TRUNC).
func truncate(fd, n int) (int, error) {
	got, _, errno := syscall.Syscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(&one)), uintptr(n),
		unix.MSG_TRUNC|unix.MSG_DONTWAIT, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(got), nil
}
