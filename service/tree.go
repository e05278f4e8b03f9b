// SPDX-License-Identifier: Apache-2.0

package service

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/weir-project/weir/internal/pidfd"
)

// Tree maps a process to its children, at one point in time.
type Tree map[int][]int

// ReadTree reads all processes visible to this user.
func ReadTree() (Tree, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	t := Tree{}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if parent, err := pidfd.Parent(pid); err == nil { // otherwise it has exited
			t[parent] = append(t[parent], pid)
		}
	}
	return t, nil
}

// Descendants returns the given processes and all their descendants, each once.
func (t Tree) Descendants(pids []int) []int {
	var out []int
	seen := map[int]bool{}
	for next := pids; len(next) > 0; {
		var more []int
		for _, pid := range next {
			if !seen[pid] {
				seen[pid] = true
				out = append(out, pid)
				more = append(more, t[pid]...)
			}
		}
		next = more
	}
	return out
}

// children returns the processes started by the threads of a process, if the kernel reports them (CONFIG_PROC_CHILDREN).
// Unlike ReadTree it reads no other process.
func children(pid int) (out []int) {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, path := range files {
		b, _ := os.ReadFile(path)
		for _, f := range strings.Fields(string(b)) {
			if child, err := strconv.Atoi(f); err == nil {
				out = append(out, child)
			}
		}
	}
	return out
}

// ListSockets lists the inode numbers of the processes' open sockets, each once per process. An exited process has none.
func ListSockets(pids []int) ([]uint32, error) {
	var out []uint32
	for _, pid := range pids {
		p, err := pidfd.Open(pid)
		var fds map[uint32][]int
		if err == nil {
			fds, err = p.Sockets()
			p.Close()
		}
		if err != nil && !errors.Is(err, pidfd.ErrGone) {
			return nil, err
		}
		for inode := range fds {
			out = append(out, inode)
		}
	}
	return out, nil
}
