// SPDX-License-Identifier: Apache-2.0

package repair

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// FD is the session's socket, for who keeps a duplicate of it beside.
func (b *Built) FD() int { return b.fd }

// Pending is what Start will send for the first time.
func (b *Built) Pending() []byte { return b.state.Send[len(b.state.Send)-b.state.Unsent:] }

// Adopt takes over a socket that another process has built, and perhaps started: with it a session goes on whose builder
// died between the two. Of s.Send only the unsent bytes count, those that are yet to be sent: all of it. The caller
// keeps fd, a duplicate of it is used. The peer is asked what it has: its answer may have been lost with the builder.
func Adopt(fd int, s *State) (*Built, error) {
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("adopt %s: %w", s.Flow(), err)
	}
	return &Built{fd: dup, state: s, o: RestoreOptions{Probe: true}}, nil
}

// Freeze switches repair on, so that closing the socket is silent: of a session that lives elsewhere, or is to end without a word.
func Freeze(fd int) error {
	if err := setInt(fd, unix.IPPROTO_TCP, unix.TCP_REPAIR, repairOn); err != nil {
		return explainRepair(err)
	}
	return nil
}

// Frozen says whether a socket is under repair.
func Frozen(fd int) (bool, error) {
	v, err := unix.GetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_REPAIR)
	return v == 1, err
}
