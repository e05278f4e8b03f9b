// SPDX-License-Identifier: Apache-2.0

package safefile

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/weir-project/weir/internal/mountinfo"
	"golang.org/x/sys/unix"
)

// device is the file system at the current point of a path walk.
type device struct {
	major, minor uint32
	known        bool
}

// enter rejects a file system of another user (FUSE). It may never answer, and even SIGKILL does
// not end a thread waiting for it. So the check must not call it: reaching its mount point does
// not, and AT_STATX_DONT_SYNC does not.
func (d *device) enter(fd int, path string) error {
	var st unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE, &st); err != nil {
		return &os.PathError{Op: "stat", Path: path, Err: err}
	}
	if d.known && d.major == st.Dev_major && d.minor == st.Dev_minor {
		return nil
	}
	*d = device{st.Dev_major, st.Dev_minor, true}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil // without /proc nothing below can be opened
	}
	if uid, ok := fuseUser(string(mounts), fmt.Sprintf("%d:%d", st.Dev_major, st.Dev_minor)); ok && !ours(uid) {
		return fmt.Errorf("%s: %w: it is on a file system of user %d (FUSE)", path, ErrRefused, uid)
	}
	return nil
}

// fuseUser returns the mounting user of a FUSE device, from proc_pid_mountinfo(5).
func fuseUser(mounts, device string) (uid uint32, ok bool) {
	for _, m := range mountinfo.Parse(mounts) {
		if m.Device != device {
			continue
		}
		if m.Type != "fuse" && m.Type != "fuseblk" && !strings.HasPrefix(m.Type, "fuse.") {
			return 0, false
		}
		for option := range strings.SplitSeq(m.Super, ",") {
			if v, found := strings.CutPrefix(option, "user_id="); found {
				n, err := strconv.ParseUint(v, 10, 32)
				return uint32(n), err == nil
			}
		}
		return 0, true
	}
	return 0, false
}
