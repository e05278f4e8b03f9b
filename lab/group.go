// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/units"
)

// Group is a cgroup of a run. It sums the CPU time of its processes and kernel threads, including ended
// ones.
type Group struct{ dir string }

// Group creates a cgroup. Close removes it.
func (e *Env) Group(name string) (*Group, error) {
	root, err := units.CgroupRoot()
	if err != nil {
		return nil, err
	}
	g := &Group{filepath.Join(root, prefix+e.id+"-"+name)}
	if err := os.Mkdir(g.dir, 0o755); err != nil {
		return nil, fmt.Errorf("create a cgroup: %w", err)
	}
	return g, nil
}

// Claim moves a process and its descendants into the group; their later children start in the group. CPU
// time from before the move is not counted. pid may be a kernel thread.
func (g *Group) Claim(pid int) error {
	for _, p := range Family(pid) {
		// A child may have ended since the listing. As a zombie it still exists, but cannot be moved
		// (ESRCH).
		if err := g.add(p); err != nil && (p == pid || !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ESRCH) && !isGone(p)) {
			return fmt.Errorf("move process %d into a cgroup: %w", p, err)
		}
	}
	return nil
}

func (g *Group) add(pid int) error {
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		err := os.WriteFile(filepath.Join(g.dir, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0)
		// A kernel thread cannot be moved before its first run.
		if !errors.Is(err, unix.EINVAL) || time.Now().After(deadline) {
			return err
		}
	}
}

func isGone(pid int) bool {
	_, err := os.Stat(fmt.Sprintf("/proc/%d", pid))
	return err != nil
}

// pids lists the processes of the group.
func (g *Group) pids() ([]int, error) { return units.CgroupProcs(g.dir) }

// CPU returns the CPU time of the group since its creation: the scheduler's count in µs, not in ticks.
func (g *Group) CPU() (time.Duration, error) {
	b, err := os.ReadFile(filepath.Join(g.dir, "cpu.stat"))
	if err != nil {
		return 0, err
	}
	return parseUsage(b)
}

// parseUsage returns usage_usec of a cgroup's cpu.stat.
func parseUsage(stat []byte) (time.Duration, error) {
	for lines := bufio.NewScanner(bytes.NewReader(stat)); lines.Scan(); {
		if v, ok := strings.CutPrefix(lines.Text(), "usage_usec "); ok {
			n, err := strconv.ParseInt(v, 10, 64)
			return time.Duration(n) * time.Microsecond, err
		}
	}
	return 0, errors.New("cpu.stat has no usage_usec")
}

// Family lists a process and its descendants, parents first.
func Family(pid int) []int {
	children := map[int][]int{}
	for _, p := range pids() {
		if parent, ok := parentPID(p); ok {
			children[parent] = append(children[parent], p)
		}
	}
	all := []int{pid}
	for i := 0; i < len(all); i++ {
		all = append(all, children[all[i]]...)
	}
	return all
}

func parentPID(pid int) (int, bool) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, false
	}
	f := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:])) // state, parent, …
	if len(f) < 2 {
		return 0, false
	}
	parent, err := strconv.Atoi(f[1])
	return parent, err == nil
}

// groupDirs lists the cgroups of a run.
func groupDirs(id string) []string {
	root, err := units.CgroupRoot()
	if err != nil {
		return nil // without cgroup2 none was created
	}
	dirs, _ := filepath.Glob(filepath.Join(root, prefix+id+"-*"))
	return dirs
}

// removeGroups removes the cgroups of a run after its processes have ended. Kernel threads end some time
// after the namespace of their interface. They are moved to the parent cgroup.
func removeGroups(id string) {
	for _, dir := range groupDirs(id) {
		for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
			home := Group{filepath.Dir(dir)}
			left, _ := (&Group{dir}).pids()
			for _, pid := range left {
				_ = home.add(pid)
			}
			if err := os.Remove(dir); err == nil || errors.Is(err, fs.ErrNotExist) || time.Now().After(deadline) {
				break // leftovers reports failures
			}
		}
	}
}
