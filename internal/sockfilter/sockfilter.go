// SPDX-License-Identifier: Apache-2.0

// Package sockfilter attaches eBPF programs to sockets (SO_ATTACH_BPF), and never over a filter of somebody else.
package sockfilter

import (
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ErrOccupied says that the socket has a filter that is not its own.
var ErrOccupied = errors.New("somebody else's program is there")

// ErrUnsupported says that the kernel puts no filter at this kind of socket.
var ErrUnsupported = errors.New("this kernel or user cannot do that")

// Filter is the filter of one socket: what it returns is how many bytes of a
// packet the socket gets, 0 drops it. There is no link: the filter stays until the
// socket closes or somebody takes it away, and a socket has room for one.
type Filter struct {
	FD   int
	Name string // what it is, for errors: "udp 0.0.0.0:53"

	ours bool
}

func (s *Filter) String() string { return "the socket " + s.Name }

// Attach makes the socket run prog, the descriptor of a program of type socket filter. It never replaces a
// filter that is not its own: a socket that has one, classic or eBPF, gives
// [ErrOccupied], and so does one that the application has locked
// (SO_LOCK_FILTER). Between asking and attaching an application may attach its
// own, which is then replaced: attach before the application runs, or when it
// says that it will not.
//
// A second call of the same Filter exchanges the program: a packet meets the
// one or the other.
//
// An unprivileged process may have nothing but the descriptor of the program: asking the
// kernel about it takes a right, attaching it takes none.
func (s *Filter) Attach(prog int) error {
	if !s.ours {
		if err := s.free(); err != nil {
			return fmt.Errorf("attaching to %s: %w", s, err)
		}
	}
	err := unix.SetsockoptInt(s.FD, unix.SOL_SOCKET, unix.SO_ATTACH_BPF, prog)
	if errors.Is(err, unix.EOPNOTSUPP) {
		return fmt.Errorf("attaching to %s: %w: %w: MPTCP sockets take no filter, and Go's listeners are such by default: net.ListenConfig.SetMultipathTCP(false)", s, ErrUnsupported, err)
	}
	if err != nil {
		return fmt.Errorf("attaching to %s: %w", s, err)
	}
	s.ours = true
	return nil
}

// free says why the socket has no room for a filter.
func (s *Filter) free() error {
	locked, err := unix.GetsockoptInt(s.FD, unix.SOL_SOCKET, unix.SO_LOCK_FILTER)
	if err != nil {
		return fmt.Errorf("asking whether its filter is locked: %w", err)
	}
	if locked != 0 {
		return fmt.Errorf("%w: the application has locked its filter (SO_LOCK_FILTER): filter at hook nft, netfilter or tcx", ErrOccupied)
	}
	// sk_get_filter (net/core/filter.c) gives the length of a classic filter, and
	// EACCES for one of eBPF, which it cannot give.
	var n uint32
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(s.FD), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, 0, uintptr(unsafe.Pointer(&n)), 0)
	switch {
	case errors.Is(errno, unix.EACCES):
		return fmt.Errorf("%w: an eBPF filter", ErrOccupied)
	case errno != 0:
		return fmt.Errorf("asking for its filter: %w", errno)
	case n > 0:
		return fmt.Errorf("%w: a classic filter of %d instructions", ErrOccupied, n)
	}
	return nil
}

// Detach takes away what Attach put there. A filter that is gone is no error.
func (s *Filter) Detach() error {
	if !s.ours {
		return nil
	}
	err := unix.SetsockoptInt(s.FD, unix.SOL_SOCKET, unix.SO_DETACH_BPF, 0)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("detaching from %s: %w", s, err)
	}
	s.ours = false
	return nil
}
