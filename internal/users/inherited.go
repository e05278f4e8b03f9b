// SPDX-License-Identifier: Apache-2.0

package users

import (
	"errors"
	"fmt"
	"math"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// closeOnExec marks the descriptors from 3 on. The caller's shell may have left some open, and programs of other users
// must not inherit them. Later duplicates may be meant for such a program.
func closeOnExec() error {
	if unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC) == nil {
		return nil
	}
	open, err := os.ReadDir("/proc/self/fd") // before Linux 5.11
	if err != nil {
		return fmt.Errorf("list descriptors: %w", err)
	}
	for _, e := range open {
		if fd, err := strconv.Atoi(e.Name()); err == nil && fd >= 3 {
			_, _ = unix.FcntlInt(uintptr(fd), unix.F_SETFD, unix.FD_CLOEXEC) // it may be closed meanwhile
		}
	}
	return nil
}

// LeaveTerminal takes the controlling terminal from this process and its later programs. Another user's program could
// put input into it, and the shell would run that as the caller (TIOCSTI in ioctl_tty(2), before Linux 6.2 or with
// dev.tty.legacy_tiocsti=1). It can still read and write the terminal. A session leader keeps its terminal: without the
// leader nobody reads input there.
func LeaveTerminal() error {
	if sid, err := unix.Getsid(0); err != nil || sid == os.Getpid() {
		return err
	}
	tty, err := os.OpenFile("/dev/tty", os.O_RDWR|unix.O_NOCTTY, 0)
	if errors.Is(err, unix.ENXIO) || errors.Is(err, os.ErrNotExist) {
		return nil // it has none
	}
	if err != nil {
		return err
	}
	defer tty.Close()
	if err := unix.IoctlSetInt(int(tty.Fd()), unix.TIOCNOTTY, 0); err != nil {
		return fmt.Errorf("leave the terminal: %w", err)
	}
	return nil
}
