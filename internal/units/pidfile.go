// SPDX-License-Identifier: Apache-2.0

package units

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/safefile"
)

// maxPID is the largest process id on any Linux (PID_MAX_LIMIT).
const maxPID = 1 << 22

// ReadPIDFile reads the process id on the first line of a file. It does not check that such a
// process runs, or that it is the intended one. For a missing file the error wraps
// [os.ErrNotExist].
//
// A file not owned by root may only name processes of its owner. Otherwise a user with write access
// could make root take over another user's sockets.
func ReadPIDFile(path string) (int, error) {
	// A wrong path may be a log of gigabytes. No pid is longer than this, and neither are the lines
	// added by daemons.
	f, err := safefile.Read(path, 4096)
	if errors.Is(err, os.ErrNotExist) {
		return 0, fmt.Errorf("pid file %s: %w: check that the daemon runs and writes it", path, os.ErrNotExist)
	}
	if err != nil {
		return 0, fmt.Errorf("pid file: %w", err)
	}
	first, _, _ := bytes.Cut(f.Data, []byte("\n"))
	text := strings.TrimSpace(string(first))
	if text == "" {
		return 0, fmt.Errorf("pid file %s is empty; the daemon may still be starting", path)
	}
	pid, err := strconv.Atoi(text)
	if err != nil || pid <= 0 || pid > maxPID {
		return 0, fmt.Errorf("pid file %s: want a process id, 1 to %d, on its first line", path, maxPID)
	}
	if f.Trusted() {
		return pid, nil
	}
	users, err := readUsers(pid)
	switch {
	case err != nil: // it has exited, or is about to
		return pid, nil
	case f.Mode.Perm()&0o002 != 0:
		return 0, fmt.Errorf("pid file %s: it is world-writable and therefore ignored: chmod o-w %s", path, path)
	case !slices.Contains(users, f.UID):
		return 0, fmt.Errorf("pid file %s: it belongs to user %d, and names process %d of user %d: only root's file may name another user's process: chown root %s, or let the daemon write it before dropping its privileges", path, f.UID, pid, users[0], path)
	}
	return pid, nil
}

// readUsers returns a process's real, effective, saved and file system user.
func readUsers(pid int) (out []uint32, err error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return nil, err
	}
	_, line, ok := strings.Cut(string(text), "\nUid:")
	line, _, _ = strings.Cut(line, "\n")
	for _, f := range strings.Fields(line) {
		n, err := strconv.ParseUint(f, 10, 32)
		if err != nil {
			return nil, fmt.Errorf("/proc/%d/status: Uid: %q", pid, line)
		}
		out = append(out, uint32(n))
	}
	if !ok || len(out) == 0 {
		return nil, fmt.Errorf("/proc/%d/status has no Uid", pid)
	}
	return out, nil
}

// IsInitPIDNamespace reports whether process ids here are the kernel's own, as in BPF programs, and
// not a container's.
func IsInitPIDNamespace() bool {
	const initInode = 0xEFFFFFFC // PROC_PID_INIT_INO, linux/proc_ns.h
	var st unix.Stat_t
	return unix.Stat("/proc/self/ns/pid", &st) == nil && st.Ino == initInode
}
