// SPDX-License-Identifier: Apache-2.0

package bounded

import (
	"encoding/binary"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Getsockname is unix.Getsockname for an IPv4 or IPv6 socket shared with another process. For other
// families it returns EAFNOSUPPORT. It may wait for the socket's lock. The version of package unix
// does not tell Go's runtime about the wait. Garbage collection, and with it the whole process,
// would then wait, too; on one CPU all goroutines would at once.
func Getsockname(fd int) (unix.Sockaddr, error) { return address(unix.SYS_GETSOCKNAME, fd) }

// Getpeername is unix.Getpeername, like [Getsockname].
func Getpeername(fd int) (unix.Sockaddr, error) { return address(unix.SYS_GETPEERNAME, fd) }

func address(call uintptr, fd int) (unix.Sockaddr, error) {
	var raw unix.RawSockaddrAny
	length := uint32(unsafe.Sizeof(raw))
	if _, _, e := unix.Syscall(call, uintptr(fd), uintptr(unsafe.Pointer(&raw)), uintptr(unsafe.Pointer(&length))); e != 0 {
		return nil, e
	}
	port := func(n uint16) int { // big-endian
		return int(binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, n)))
	}
	switch raw.Addr.Family {
	case unix.AF_INET:
		a := (*unix.RawSockaddrInet4)(unsafe.Pointer(&raw))
		return &unix.SockaddrInet4{Port: port(a.Port), Addr: a.Addr}, nil
	case unix.AF_INET6:
		a := (*unix.RawSockaddrInet6)(unsafe.Pointer(&raw))
		return &unix.SockaddrInet6{Port: port(a.Port), ZoneId: a.Scope_id, Addr: a.Addr}, nil
	}
	return nil, unix.EAFNOSUPPORT
}
