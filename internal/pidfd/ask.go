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

// Ask runs f, which asks the kernel for something of a process that its owner may be asked for (ptrace(2), access mode
// checking): descriptors, namespaces, the executable, start time. The kernel answers such questions once an execve(2) of the
// process is over, and a user can have that take for ever: it closes descriptors meanwhile, also on a file system of the
// user's (FUSE). So Ask gives up after a second, and fails at once for the user's processes after that. late gets what f
// returns later; nil: nobody does.
func Ask[T any](pid int, f func() (T, error), late func(T, error)) (T, error) {
	return bounded.Do(bounded.Process(pid), f, late)
}

// Readlink reads a link of /proc/PID.
func Readlink(pid int, name string) (string, error) {
	return Ask(pid, func() (string, error) { return os.Readlink(fmt.Sprintf("/proc/%d/%s", pid, name)) }, nil)
}

// linksAtOnce bounds the links that one call of Ask reads: a process may have a million descriptors.
const linksAtOnce = 512

// eachLink calls f with the number and the target of each descriptor of a process, until f says no.
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

// readlinks leaves the targets of descriptors empty that were closed since they were listed.
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

// Holders are the processes that have any of these sockets open, by inode number, each once and ascending. Those that
// cannot be asked are left out.
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

// All are the numbers of all processes that this user can see, ascending.
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
