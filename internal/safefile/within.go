// SPDX-License-Identifier: Apache-2.0

package safefile

import (
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// call is a call of Within in progress.
type call struct {
	began time.Time
	back  chan struct{} // closed on return
}

var (
	mu    sync.Mutex
	asked = map[string]*call{}
)

// begin registers a call for a key. If one is in progress, it returns that one.
func begin(key string) (mine, other *call) {
	mu.Lock()
	defer mu.Unlock()
	if c := asked[key]; c != nil {
		return nil, c
	}
	c := &call{began: time.Now(), back: make(chan struct{})}
	asked[key] = c
	return c, nil
}

func (c *call) end(key string) {
	mu.Lock()
	defer mu.Unlock()
	delete(asked, key)
	close(c.back)
}

// turn waits until no other call for the key is in progress. It fails if one has taken longer than
// two seconds, or after two seconds of waiting.
func turn(key string) (*call, error) {
	for began := time.Now(); ; {
		mine, other := begin(key)
		if mine != nil {
			return mine, nil
		}
		within := min(readTime-time.Since(other.began), readTime-time.Since(began))
		if other.returns(within) {
			continue
		}
		return nil, fmt.Errorf("%s: %w: its file system has not answered an earlier call", key, ErrRefused)
	}
}

// returns waits for a call's return, up to a time limit. After a stall of the host, both the return
// and the timeout may be due. The return then counts.
func (c *call) returns(within time.Duration) bool {
	timer := time.NewTimer(within)
	defer timer.Stop()
	select {
	case <-c.back:
		return true
	case <-timer.C:
	}
	select {
	case <-c.back:
		return true
	default:
		return false
	}
}

// Within runs f. It waits at most two seconds for its turn and two more for f. It is for calls that
// another user can block, by a file system of his own or by memory in one. Such a call occupies a
// thread until that user releases it, and cannot be ended. So only one per key runs at a time.
// Others wait for their turn, and fail at once while a call of more than two seconds has not
// returned.
func Within[T any](key string, f func() (T, error)) (T, error) {
	type result struct {
		v   T
		err error
	}
	var none T
	mine, err := turn(key)
	if err != nil {
		return none, err
	}
	done := make(chan result, 1)
	go func() {
		v, err := f()
		done <- result{v, err}
		mine.end(key)
	}()
	if !mine.returns(readTime) {
		return none, fmt.Errorf("%s: %w: no answer from its file system within %s", key, ErrRefused, readTime)
	}
	r := <-done
	return r.v, r.err
}

// Seen is a version of a file, to detect changes.
type Seen struct {
	Changed time.Time
	Size    int64

	inode  uint64
	status time.Time // of the last change; no user can set it
}

// Settled reports whether a later change is sure to give another Seen. File systems have a limited
// time resolution.
func (s Seen) Settled() bool { return time.Since(s.status) > readTime }

func seen(st *unix.Stat_t) Seen {
	return Seen{time.Unix(st.Mtim.Unix()), st.Size, st.Ino, time.Unix(st.Ctim.Unix())}
}

// Stat returns the version of a file readable by Read.
func Stat(path string) (Seen, error) {
	return Within("stat "+path, func() (Seen, error) {
		f, st, err := openFile(path)
		if err != nil {
			return Seen{}, err
		}
		f.Close()
		return seen(st), nil
	})
}

// isKernels reports whether a file is on a file system where reading has effects: /proc, /sys and
// mounts in there.
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
