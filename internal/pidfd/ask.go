// SPDX-License-Identifier: Apache-2.0

package pidfd

import (
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"

	"github.com/weir-project/weir/internal/bounded"
)

// Ask runs f, a query to the kernel about a process with a ptrace(2) access check: descriptors,
// namespaces, the executable, the start time. The kernel delays the answer during an execve(2) of
// the process. A user can extend that without limit, because execve closes descriptors, also on the
// user's own file system (FUSE). So Ask times out after a second. Queries for the user's processes
// then fail at once for a while. late gets a late result of f; nil discards it.
func Ask[T any](pid int, f func() (T, error), late func(T, error)) (T, error) {
	return bounded.Do(bounded.Process(pid), f, late)
}

// Readlink reads a link in /proc/PID.
func Readlink(pid int, name string) (string, error) {
	return Ask(pid, func() (string, error) { return os.Readlink(fmt.Sprintf("/proc/%d/%s", pid, name)) }, nil)
}

// linksAtOnce limits the links read per call of Ask, because a process may have a million
// descriptors.
const linksAtOnce = 512

// eachLink calls f with the number and the target of each descriptor of a process, until f returns
// false.
func eachLink(pid int, f func(fd, target string) bool) error {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for len(entries) > 0 {
		some := entries[:min(len(entries), linksAtOnce)]
		entries = entries[len(some):]
		targets, err := Ask(pid, func() ([]string, error) { return readlinks(dir, some) }, nil)
		if err != nil {
			return err
		}
		for i, target := range targets {
			if target != "" && !f(some[i].Name(), target) {
				return nil
			}
		}
	}
	return nil
}

// readlinks returns the targets of descriptors, empty for descriptors closed since the listing.
func readlinks(dir string, entries []fs.DirEntry) ([]string, error) {
	out := make([]string, len(entries))
	for i, e := range entries {
		target, err := os.Readlink(dir + "/" + e.Name())
		if err != nil && !os.IsNotExist(err) {
			return nil, err
		}
		out[i] = target
	}
	return out, nil
}

// Holders returns the processes with any of these sockets open, by inode number, each once and
// ascending. It omits inaccessible processes.
func Holders(inodes ...uint32) map[uint32][]int {
	out := make(map[uint32][]int, len(inodes))
	for _, i := range inodes {
		if i != 0 {
			out[i] = nil
		}
	}
	for _, pid := range All() {
		found := map[uint32]bool{}
		_ = eachLink(pid, func(_, target string) bool {
			if inode, ok := socketInode(target); ok && !found[inode] {
				if at, wanted := out[inode]; wanted {
					found[inode] = true
					out[inode] = append(at, pid)
				}
			}
			return len(found) < len(out)
		})
	}
	return out
}

// All returns the numbers of all processes visible to this user, ascending.
func All() (out []int) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			out = append(out, pid)
		}
	}
	slices.Sort(out)
	return out
}
