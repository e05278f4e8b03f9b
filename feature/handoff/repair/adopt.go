// SPDX-License-Identifier: Apache-2.0

package repair

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// FD returns the session's socket, for callers that keep a duplicate.
func (b *Built) FD() int { return b.fd }

// Pending returns the unsent bytes. Start sends them.
func (b *Built) Pending() []byte { return b.state.Send[len(b.state.Send)-b.state.Unsent:] }

// Adopt takes over a socket that another process has built, and may have started. It continues a session whose
// builder died between the two. s.Send must contain only the unsent bytes. Adopt duplicates fd; the caller keeps it.
// Start sends a probe, because the peer's answer may have been lost with the builder.
func Adopt(fd int, s *State) (*Built, error) {
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("adopt %s: %w", s.Flow(), err)
	}
	return &Built{fd: dup, state: s, o: RestoreOptions{Probe: true}}, nil
}

// Freeze enables repair mode, so closing the socket is silent. Use it for a session that lives elsewhere, or has to
// end without a packet.
func Freeze(fd int) error {
	if err := setInt(fd, unix.IPPROTO_TCP, unix.TCP_REPAIR, repairOn); err != nil {
		return explainRepair(err)
	}
	return nil
}

// Frozen reports whether a socket is in repair mode.
func Frozen(fd int) (bool, error) {
	v, err := unix.GetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_REPAIR)
	return v == 1, err
}
