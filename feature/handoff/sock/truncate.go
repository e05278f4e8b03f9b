// SPDX-License-Identifier: Apache-2.0

package sock

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// thrown is the target of kernels that copy in spite of MSG_TRUNC, as kTLS does. Nobody reads it.
var thrown [64 << 10]byte

// truncate is recv(fd, …, n, MSG_TRUNC). It discards up to n bytes of a TCP socket's queue. Plain
// TCP writes nothing to memory (tcp_recvmsg_locked copies unless MSG_TRUNC).
func truncate(fd, n int) (int, error) {
	got, _, errno := syscall.Syscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(&thrown)), uintptr(min(n, len(thrown))),
		unix.MSG_TRUNC|unix.MSG_DONTWAIT, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(got), nil
}
