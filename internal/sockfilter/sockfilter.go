// SPDX-License-Identifier: Apache-2.0

// Package sockfilter attaches eBPF programs to sockets (SO_ATTACH_BPF). It never replaces another
// filter.
package sockfilter

import (
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ErrOccupied reports another program at the socket, or at another place with room for one.
var ErrOccupied = errors.New("another program is there")

// ErrUnsupported reports an operation not supported for this kernel, user or kind of socket.
var ErrUnsupported = errors.New("not supported by this kernel or user")

// Filter is the filter of one socket. The program returns the number of bytes delivered to the
// socket; 0 drops the packet. There is no link: the filter stays until the socket closes or the
// filter is detached. A socket has only one filter.
type Filter struct {
	FD   int
	Name string // for errors, such as "udp 0.0.0.0:53"

	ours bool
}

func (s *Filter) String() string { return "the socket " + s.Name }

// Attach makes the socket run prog, the descriptor of a program of type socket filter. It never
// replaces another filter. For a socket with one, classic or eBPF, it returns [ErrOccupied], and
// also if the application has locked the filter (SO_LOCK_FILTER). Between the check and the
// attachment an application may attach its own, which is then replaced. So attach before the
// application runs, or if it never attaches one.
//
// A second call of the same Filter exchanges the program. Each packet meets exactly one of the two.
//
// An unprivileged process needs only the program's descriptor. Queries about the program need
// privileges, attaching does not.
func (s *Filter) Attach(prog int) error {
	if !s.ours {
		if err := s.free(); err != nil {
			return fmt.Errorf("attach to %s: %w", s, err)
		}
	}
	err := unix.SetsockoptInt(s.FD, unix.SOL_SOCKET, unix.SO_ATTACH_BPF, prog)
	if errors.Is(err, unix.EOPNOTSUPP) {
		return fmt.Errorf("attach to %s: %w: %w: MPTCP sockets have no filters, and Go uses MPTCP for listeners by default: call net.ListenConfig.SetMultipathTCP(false)", s, ErrUnsupported, err)
	}
	if err != nil {
		return fmt.Errorf("attach to %s: %w", s, err)
	}
	s.ours = true
	return nil
}

// free returns the reason why the socket has no room for a filter.
func (s *Filter) free() error {
	locked, err := unix.GetsockoptInt(s.FD, unix.SOL_SOCKET, unix.SO_LOCK_FILTER)
	if err != nil {
		return fmt.Errorf("read its filter lock: %w", err)
	}
	if locked != 0 {
		return fmt.Errorf("%w: the application has locked its filter (SO_LOCK_FILTER): filter at hook nft, netfilter or tcx", ErrOccupied)
	}
	// sk_get_filter (net/core/filter.c) returns the length of a classic filter, and EACCES for an
	// eBPF one.
	var n uint32
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(s.FD), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, 0, uintptr(unsafe.Pointer(&n)), 0)
	switch {
	case errors.Is(errno, unix.EACCES):
		return fmt.Errorf("%w: an eBPF filter", ErrOccupied)
	case errno != 0:
		return fmt.Errorf("read its filter: %w", errno)
	case n > 0:
		return fmt.Errorf("%w: a classic filter of %d instructions", ErrOccupied, n)
	}
	return nil
}

// Detach removes the filter attached by Attach. An already removed filter is no error.
func (s *Filter) Detach() error {
	if !s.ours {
		return nil
	}
	err := unix.SetsockoptInt(s.FD, unix.SOL_SOCKET, unix.SO_DETACH_BPF, 0)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("detach from %s: %w", s, err)
	}
	s.ours = false
	return nil
}
