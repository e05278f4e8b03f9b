// SPDX-License-Identifier: Apache-2.0

// Package mounts reads the mounts of the calling thread.
package mounts

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"unicode"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/mountinfo"
)

// At returns the mount point of a file system in this mount namespace, or "".
func At(device uint64) string {
	all, _ := mountinfo.Read()
	want := fmt.Sprintf("%d:%d", unix.Major(device), unix.Minor(device))
	for _, m := range all {
		if m.Device == want {
			return m.Point
		}
	}
	return ""
}

// Of returns the mount points of the file systems of a type in this mount namespace.
func Of(kind string) (out []string) {
	all, _ := mountinfo.Read()
	for _, m := range all {
		if m.Type == kind {
			out = append(out, m.Point)
		}
	}
	return out
}

// Above returns the mount point above a path.
func Above(path string) string {
	best := "/"
	all, _ := mountinfo.Read()
	for _, m := range all {
		if len(m.Point) > len(best) && (m.Point == path || strings.HasPrefix(path, m.Point+"/")) {
			best = m.Point
		}
	}
	return best
}

// OfIPNetns returns the name of the network namespace if ip netns exec started this process, else "". That command
// mounts a sysfs with this name over /sys (netns_switch in iproute2's lib/namespace.c) for its child's lifetime.
func OfIPNetns() string {
	all, err := mountinfo.Read()
	if err != nil {
		return ""
	}
	name := ""
	for _, m := range all {
		if m.Point == "/sys" && m.Type == "sysfs" {
			name = m.Source // the last one is on top
		}
	}
	if strings.Contains(name, "/") {
		return ""
	}
	if _, err := os.Stat("/run/netns/" + name); name == "" || err != nil {
		return ""
	}
	return name
}

// BPF returns the device number of the BPF file system at a path, or at its nearest parent if the path is missing. It
// returns 0 if there is none.
func BPF(path string) uint64 {
	for p := path; ; p = filepath.Dir(p) { // an emptied root has no directory
		var fs unix.Statfs_t
		st, err := os.Stat(p)
		if errors.Is(err, os.ErrNotExist) && p != filepath.Dir(p) {
			continue
		}
		if err != nil || unix.Statfs(p, &fs) != nil || fs.Type != unix.BPF_FS_MAGIC {
			return 0
		}
		return uint64(st.Sys().(*syscall.Stat_t).Dev)
	}
}

// Namespace returns the inode number of the calling thread's mount namespace.
func Namespace() (uint64, error) {
	var st unix.Stat_t
	err := unix.Stat("/proc/thread-self/ns/mnt", &st)
	return st.Ino, err
}

// ReadOnlyBPF reports whether a BPF file system at a path, or of its parent if the path is missing, is mounted read-only.
func ReadOnlyBPF(path string) bool {
	var fs unix.Statfs_t
	err := unix.Statfs(path, &fs)
	if errors.Is(err, os.ErrNotExist) { // nothing was ever pinned here
		err = unix.Statfs(filepath.Dir(path), &fs)
	}
	return err == nil && fs.Type == unix.BPF_FS_MAGIC && fs.Flags&unix.ST_RDONLY != 0
}

// Uncover describes how to reach a path hidden by another mount. at is the mount point of its file system.
func Uncover(path, at string) string {
	if strings.HasPrefix(path, at) {
		return "umount " + Word(at)
	}
	return fmt.Sprintf("they are at %s: mount --bind %s %s", at, Word(at), Word(filepath.Dir(path)))
}

// Word quotes a path for a shell if it needs that.
func Word(path string) string {
	if strings.IndexFunc(path, func(r rune) bool {
		return !strings.ContainsRune("/._-+@%:,=", r) && !unicode.IsLetter(r) && !unicode.IsDigit(r)
	}) < 0 {
		return path
	}
	return "'" + strings.ReplaceAll(path, "'", `'\''`) + "'"
}

// Visible reports whether this process may look into a directory.
func Visible(path string) bool {
	_, err := os.Stat(path + "/")
	return err == nil
}
