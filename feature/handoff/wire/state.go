// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// seals make a memfd a value: nobody changes it any more, so that whoever is given
// it may trust its size and bytes.
const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE

// NewStateFD puts a state into a sealed memfd, for the caller to close.
func NewStateFD(state []byte) (int, error) {
	fd, err := unix.MemfdCreate("weir-handoff-state", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return -1, fmt.Errorf("a memfd for %d bytes of state: %w", len(state), err)
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
		return -1, fmt.Errorf("%d bytes of state into a memfd: %w", len(state), err)
	}
	return fd, nil
}

// CheckStateFD gives the size of a state in a memfd, in bytes. The error wraps
// [ErrBadSocket] if it is no sealed memfd.
func CheckStateFD(fd int) (int64, error) {
	got, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil || got&seals != seals {
		return 0, fmt.Errorf("%w: a state's descriptor is a memfd sealed with F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_WRITE", ErrBadSocket)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return 0, fmt.Errorf("size of a state: %w", err)
	}
	return st.Size, nil
}

// ReadStateFD reads the state of a memfd of at most limit bytes, and leaves it open.
func ReadStateFD(fd int, limit int64) ([]byte, error) {
	size, err := CheckStateFD(fd)
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
	// Not from the descriptor's own offset, which its writer shares.
	if _, err := io.ReadFull(io.NewSectionReader(f, 0, size), b); err != nil {
		return nil, fmt.Errorf("reading a state: %w", err)
	}
	return b, nil
}
