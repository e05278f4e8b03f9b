// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// WriteLock is the proof that its holder is the only writer of a pin root.
// Whatever changes state is a method of it or takes one.
type WriteLock struct {
	*Root
	dir *os.File
}

// Lock waits until no other weir command changes the pins below r, then mends
// what a killed one left half done. It makes the root where it is missing.
func (r *Root) Lock(ctx context.Context) (*WriteLock, error) {
	liftMemlock()
	for {
		if err := r.ensure(); err != nil {
			return nil, err
		}
		l, err := r.tryLock()
		if err != nil {
			return nil, err
		}
		if l != nil {
			if err := l.mend(); err != nil {
				l.Unlock()
				return nil, fmt.Errorf("mending %s: %w", r.path, err)
			}
			return l, nil
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("another weir command holds the lock on %s: %w", r.path, ctx.Err())
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// tryLock returns nil without an error when the lock is taken, or when the
// directory that it took is no longer the root: the last holder may have
// removed an empty root.
func (r *Root) tryLock() (*WriteLock, error) {
	dir, err := os.Open(r.path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	err = unix.Flock(int(dir.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err != nil {
		dir.Close()
		if errors.Is(err, unix.EWOULDBLOCK) || errors.Is(err, unix.EINTR) {
			return nil, nil
		}
		return nil, fmt.Errorf("locking %s: %w", r.path, err)
	}
	held, err := dir.Stat()
	if err != nil {
		dir.Close()
		return nil, err
	}
	if now, err := os.Stat(r.path); err != nil || !os.SameFile(held, now) {
		dir.Close()
		return nil, nil
	}
	return &WriteLock{Root: r, dir: dir}, nil
}

// Unlock lets the next writer in. Directories left empty go, the root too, so
// that a host from which weir was removed has nothing of it left.
func (l *WriteLock) Unlock() {
	if l.dir == nil {
		return
	}
	scopes, _ := l.allNames(l.path)
	for _, s := range scopes {
		features, _ := l.allNames(filepath.Join(l.path, s))
		for _, f := range features {
			os.Remove(filepath.Join(l.path, s, f)) // fails unless empty, as it should
		}
		os.Remove(filepath.Join(l.path, s))
	}
	os.Remove(l.path)
	l.dir.Close()
	l.dir = nil
}

// SetGroup lets the members of a group read every pin: directories become
// 0750, maps 0640. Links stay the owner's: the kernel opens a link only for
// writing, and a writer may detach it.
func (l *WriteLock) SetGroup(gid int) error {
	if err := os.Chown(l.path, -1, gid); err != nil {
		return fmt.Errorf("giving %s to group %d: %w", l.path, gid, err)
	}
	return filepath.WalkDir(l.path, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return setRights(path, d.IsDir(), gid)
	})
}

func setRights(path string, dir bool, gid int) error {
	mode := os.FileMode(0o640)
	if dir {
		mode = 0o750
	} else if isLink(filepath.Base(path)) {
		mode = 0o600
	}
	if err := os.Chown(path, -1, gid); err != nil {
		return err
	}
	return os.Chmod(path, mode)
}

// AsWriter opens pins for writing without the lock. It is for the one process
// that a lock's holder starts and waits for, and that writes where nobody else
// does; everyone else calls Lock.
func AsWriter(r *Root) *WriteLock { return &WriteLock{Root: r} }
