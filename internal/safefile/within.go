// SPDX-License-Identifier: Apache-2.0

package safefile

import (
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// call is a call of Within that has not come back.
type call struct {
	began time.Time
	back  chan struct{} // closed when it comes back
}

var (
	mu    sync.Mutex
	asked = map[string]*call{}
)

// begin notes a call for a key, unless another one is under way: then it returns that one.
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

// turn waits until no other call for the key is under way. It fails where one has taken longer than two seconds, and where
// others have for as long gone first.
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
		return nil, fmt.Errorf("%s: %w: its file system has not answered since it was asked last", key, ErrRefused)
	}
}

// returns waits for a call's return, for a time at most. Where the host stood still meanwhile, the call may have returned as
// well as the time passed: then it has returned.
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

// Within runs f, and does not wait for longer than two seconds for its turn and two for f: it is for calls that another user can make wait, by a file
// system of his own or by memory that lies there. Such a call holds a thread until that user lets it go, and cannot be ended.
// So there is one at a time for a key. Another one waits for its turn, and fails at once while a call of more than two
// seconds has not come back.
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
		return none, fmt.Errorf("%s: %w: its file system has not answered within %s", key, ErrRefused, readTime)
	}
	r := <-done
	return r.v, r.err
}

// Seen tells a file that has changed from one that has not.
type Seen struct {
	Changed time.Time
	Size    int64

	inode  uint64
	status time.Time // of the last change, which no user can set
}

// Settled reports whether a later change of the file gives it another Seen: file systems count time in steps.
func (s Seen) Settled() bool { return time.Since(s.status) > readTime }

func seen(st *unix.Stat_t) Seen {
	return Seen{time.Unix(st.Mtim.Unix()), st.Size, st.Ino, time.Unix(st.Ctim.Unix())}
}

// Stat looks at a file that Read would read.
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
