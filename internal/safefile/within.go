// SPDX-License-Identifier: Apache-2.0

package safefile

import (
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// asked are the keys of calls of Within that have not come back.
var asked sync.Map

// Within runs f, and does not wait for longer than two seconds: it is for calls that another user can make wait, by a file
// system of his own or by memory that lies there. Such a call holds a thread until that user lets it go, and cannot be ended.
// So there is one at a time for a key: while it has not come back, Within fails at once.
func Within[T any](key string, f func() (T, error)) (T, error) {
	type result struct {
		v   T
		err error
	}
	if _, busy := asked.LoadOrStore(key, true); busy {
		var none T
		return none, fmt.Errorf("%s: %w: its file system has not answered since it was asked last", key, ErrRefused)
	}
	done := make(chan result, 1)
	go func() {
		v, err := f()
		asked.Delete(key)
		done <- result{v, err}
	}()
	timer := time.NewTimer(readTime)
	defer timer.Stop()
	select {
	case r := <-done:
		return r.v, r.err
	case <-timer.C:
		var none T
		return none, fmt.Errorf("%s: %w: its file system has not answered within %s", key, ErrRefused, readTime)
	}
}

// Seen tells a file that has changed from one that has not.
type Seen struct {
	Changed time.Time
	Size    int64
}

// Stat looks at a file that Read would read.
func Stat(path string) (Seen, error) {
	return Within("stat "+path, func() (Seen, error) {
		fd, err := open(path)
		if err != nil {
			return Seen{}, err
		}
		f := os.NewFile(uintptr(fd), path)
		defer f.Close()
		st, err := f.Stat()
		if err != nil {
			return Seen{}, err
		}
		return Seen{st.ModTime(), st.Size()}, nil
	})
}

// isKernels says whether a file is of a file system in which reading is an act: /proc, /sys and what is mounted there.
func isKernels(fd int) bool {
	var st unix.Statfs_t
	if unix.Fstatfs(fd, &st) != nil {
		return true
	}
	switch st.Type {
	case unix.PROC_SUPER_MAGIC, unix.SYSFS_MAGIC, unix.TRACEFS_MAGIC, unix.DEBUGFS_MAGIC, unix.SECURITYFS_MAGIC, unix.CGROUP2_SUPER_MAGIC,
		unix.CGROUP_SUPER_MAGIC, unix.BPF_FS_MAGIC, unix.EFIVARFS_MAGIC, unix.PSTOREFS_MAGIC, unix.SELINUX_MAGIC:
		return true
	}
	return false
}
