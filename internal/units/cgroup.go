// SPDX-License-Identifier: Apache-2.0

// Package units finds the processes of a systemd unit, a cgroup or a pid file.
package units

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/weir-project/weir/internal/mountinfo"
	"golang.org/x/sys/unix"
)

// errNoCgroup reports an unknown cgroup.
var errNoCgroup = errors.New("no such cgroup")

// CgroupRoot returns the mount point of the unified hierarchy (cgroup2). On hosts with both
// hierarchies it is not /sys/fs/cgroup. The error wraps [errors.ErrUnsupported] if it is not
// mounted.
func CgroupRoot() (string, error) {
	all, err := mountinfo.Read()
	if err != nil {
		return "", fmt.Errorf("find the cgroup2 mount: %w", err)
	}
	if root, ok := cgroupRoot(all); ok {
		return root, nil
	}
	return "", fmt.Errorf("cgroup2 is not mounted; run `mount -t cgroup2 none /sys/fs/cgroup/unified`, "+
		"or boot with systemd.unified_cgroup_hierarchy=1: %w", errors.ErrUnsupported)
}

// cgroupRoot prefers a mount of the whole hierarchy to one of a subtree, as in containers. The last
// mount wins, because it covers the others.
func cgroupRoot(all []mountinfo.Mount) (string, bool) {
	var whole, part string
	for _, m := range all {
		if m.Type != "cgroup2" {
			continue
		}
		if m.Root == "/" {
			whole = m.Point
		} else {
			part = m.Point
		}
	}
	if whole != "" {
		return whole, true
	}
	return part, part != ""
}

// CgroupProcs lists the processes of a cgroup and its descendants, ascending. The path has the form
// of systemd and /proc/PID/cgroup, "/collectors/1", or is absolute under the mount,
// "/sys/fs/cgroup/collectors/1". It omits zombies and processes outside this pid namespace. An
// unknown cgroup is an error.
func CgroupProcs(path string) ([]int, error) {
	root, err := CgroupRoot()
	if err != nil {
		return nil, fmt.Errorf("cgroup %s: %w", path, err)
	}
	return cgroupProcs(root, path)
}

func cgroupProcs(root, path string) ([]int, error) {
	dir := cgroupDir(root, path)
	if st, err := os.Stat(dir); err != nil || !st.IsDir() {
		if err == nil || gone(err) || errors.Is(err, unix.ENOTDIR) {
			return nil, fmt.Errorf("cgroup %s: %w under %s", path, errNoCgroup, root)
		}
		return nil, fmt.Errorf("cgroup %s: %w", path, err)
	}
	var pids []int
	err := filepath.WalkDir(dir, func(sub string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			return nil
		}
		if err == nil {
			var some []int
			some, err = readProcs(sub)
			pids = append(pids, some...)
		}
		if err != nil && gone(err) {
			return nil // removed since the listing, so it is empty
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("cgroup %s: %w", path, err)
	}
	slices.Sort(pids)
	return slices.Compact(pids), nil
}

// cgroupDir returns the directory of a cgroup. Cleaning the path as an absolute one keeps ".."
// inside the hierarchy.
func cgroupDir(root, path string) string {
	path = filepath.Clean("/" + path)
	if path == root || strings.HasPrefix(path, root+"/") {
		return path
	}
	return filepath.Join(root, path)
}

// gone reports whether a cgroup was removed before (ENOENT) or after (ENODEV) its file was opened.
func gone(err error) bool {
	return errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENODEV)
}

func readProcs(dir string) ([]int, error) {
	pids, err := readIDs(filepath.Join(dir, "cgroup.procs"))
	if !errors.Is(err, unix.EOPNOTSUPP) {
		return pids, err
	}
	// A threaded cgroup contains threads of processes in a cgroup above
	// (Documentation/admin-guide/cgroup-v2.rst, "Threads").
	tids, err := readIDs(filepath.Join(dir, "cgroup.threads"))
	if errors.Is(err, unix.EOPNOTSUPP) {
		return nil, nil // "domain invalid": always empty
	}
	if err != nil {
		return nil, err
	}
	pids = nil
	for _, tid := range tids {
		if pid, ok := findProcess(tid); ok {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

func readIDs(file string) ([]int, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var ids []int
	for line := range strings.Lines(string(data)) {
		id, err := strconv.Atoi(strings.TrimSpace(line))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		if id != 0 { // 0 means outside this pid namespace
			ids = append(ids, id)
		}
	}
	return ids, nil
}

// findProcess returns the process of a thread.
func findProcess(tid int) (int, bool) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", tid))
	if err != nil {
		return 0, false
	}
	for line := range strings.Lines(string(status)) {
		if v, ok := strings.CutPrefix(line, "Tgid:"); ok {
			pid, err := strconv.Atoi(strings.TrimSpace(v))
			return pid, err == nil
		}
	}
	return 0, false
}
