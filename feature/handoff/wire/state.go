// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// seals make a memfd immutable, so its receiver may trust its size and content.
const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE

// Spill moves State and Unread into a sealed memfd if they are too large for the message. The memfd
// must be the message's last descriptor, and the caller closes it. Otherwise Spill returns -1.
func (m *Message) Spill() (int, error) {
	if len(m.State)+len(m.Unread) <= MaxInline {
		return -1, nil
	}
	fd, err := newStateFD(m.State, m.Unread)
	if err != nil {
		return -1, err
	}
	m.Sizes = [2]uint64{uint64(len(m.State)), uint64(len(m.Unread))}
	m.State, m.Unread, m.Flags = nil, nil, m.Flags|StateFD
	return fd, nil
}

// Fetch undoes Spill for a message with StateFD set. It reads State and Unread from the memfd,
// which stays open. The error wraps [ErrLimit] if they have more than limit bytes together. It
// wraps [ErrBadSocket] if fd is no sealed memfd of the announced size.
func (m *Message) Fetch(fd int, limit int64) error {
	b, err := readStateFD(fd, limit)
	if err != nil {
		return err
	}
	if uint64(len(b)) != m.Sizes[0]+m.Sizes[1] {
		return fmt.Errorf("%w: the memfd has %d bytes, the message announces %d and %d", ErrBadSocket, len(b), m.Sizes[0], m.Sizes[1])
	}
	m.State, m.Unread = b[:m.Sizes[0]:m.Sizes[0]], b[m.Sizes[0]:]
	m.Sizes, m.Flags = [2]uint64{}, m.Flags&^StateFD
	return nil
}

// newStateFD returns a sealed memfd with the given bytes. The caller closes it.
func newStateFD(parts ...[]byte) (int, error) {
	state := bytes.Join(parts, nil)
	fd, err := unix.MemfdCreate("weir-handoff-state", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return -1, fmt.Errorf("create a memfd for %d bytes of state: %w", len(state), err)
	}
	for done := 0; done < len(state) && err == nil; {
		var n int
		if n, err = unix.Write(fd, state[done:]); errors.Is(err, unix.EINTR) {
			err = nil
		}
		done += max(n, 0)
	}
	if err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals|unix.F_SEAL_SEAL)
	}
	if err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("write %d bytes of state to a memfd: %w", len(state), err)
	}
	return fd, nil
}

// checkStateFD returns the size of a state in a memfd, in bytes. The error wraps [ErrBadSocket] for
// a descriptor other than a sealed memfd.
func checkStateFD(fd int) (int64, error) {
	got, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil || got&seals != seals {
		return 0, fmt.Errorf("%w: a state's descriptor must be a memfd sealed with F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_WRITE", ErrBadSocket)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return 0, fmt.Errorf("read the size of a state: %w", err)
	}
	return st.Size, nil
}

// readStateFD reads the state in a memfd of at most limit bytes. The memfd stays open.
func readStateFD(fd int, limit int64) ([]byte, error) {
	size, err := checkStateFD(fd)
	if err != nil {
		return nil, err
	}
	if size > limit {
		return nil, fmt.Errorf("%w: a state of %d bytes; at most %d", ErrLimit, size, limit)
	}
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(dup), "state")
	defer f.Close()
	b := make([]byte, size)
	// The descriptor's own offset is shared with its writer, so it is not used.
	if _, err := io.ReadFull(io.NewSectionReader(f, 0, size), b); err != nil {
		return nil, fmt.Errorf("read a state: %w", err)
	}
	return b, nil
}
