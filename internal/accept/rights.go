// SPDX-License-Identifier: Apache-2.0

package accept

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Permit sets the mode of the Unix socket at a path, and its group unless gid is -1. It never
// follows a symbolic link and changes only sockets. Anyone with write access to the directory can
// replace the socket by something else (as in CVE-2017-18925).
func Permit(path string, gid int, mode os.FileMode) error {
	fail := func(err error) error { return fmt.Errorf("set the rights of socket %s: %w", path, err) }
	fd, err := unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return fail(err)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fail(err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFSOCK {
		return fail(fmt.Errorf("it was replaced: choose a directory writable only by root"))
	}
	if gid >= 0 {
		if err := unix.Fchownat(fd, "", -1, gid, unix.AT_EMPTY_PATH); err != nil {
			return fail(err)
		}
	}
	// fchmod(2) refuses O_PATH descriptors. The link in /proc leads to the opened file, even if the
	// path has changed.
	if err := unix.Chmod(fmt.Sprintf("/proc/self/fd/%d", fd), uint32(mode.Perm())); err != nil {
		return fail(err)
	}
	return nil
}
