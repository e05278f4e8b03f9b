// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"
)

// WriteLock proves that its holder is the only writer of a pin root. Functions that change state are its methods or take
// one.
type WriteLock struct {
	*Root
	dir *os.File // the locked directory

	counted    bool  // included in writing
	unrecorded error // first failure to write a record
}

// Lock waits for the write lock of r, then recovers changes left half done by a killed writer. It creates a missing
// root.
func (r *Root) Lock(ctx context.Context) (*WriteLock, error) {
	LiftMemlock()
	for began, told := time.Now(), false; ; {
		if err := r.Usable(); err != nil {
			return nil, err
		}
		if err := r.ensure(); err != nil {
			return nil, err
		}
		l, err := r.tryLock()
		if err != nil {
			return nil, err
		}
		if l != nil {
			if err := errors.Join(l.recover(), l.sweep()); err != nil {
				l.Unlock()
				return nil, fmt.Errorf("recover %s: %w", r.path, err)
			}
			l.noteMissing()
			l.counted = true
			writing.now.Add(1)
			writing.ever.Add(1)
			return l, nil
		}
		if !told && time.Since(began) > tellAfter {
			told = true
			tellWait(fmt.Sprintf("waiting for the lock on %s, held by %s", r.path, cmp.Or(r.lockOwner(), "another process")))
		}
		select {
		case <-ctx.Done():
			return nil, &Interrupted{fmt.Sprintf("nothing was changed: %s holds the lock on %s", cmp.Or(r.lockOwner(), "another weir command"), r.path), ctx.Err()}
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// tryLock returns nil without an error if the lock is held, or if the locked directory is no longer the root's: the
// previous holder may have removed an empty root.
func (r *Root) tryLock() (*WriteLock, error) {
	dir, err := r.openLock()
	if dir == nil {
		return nil, err
	}
	l := &WriteLock{Root: r, dir: dir}
	ok, err := tryFlock(dir)
	if err == nil && ok {
		var held os.FileInfo
		if held, err = dir.Stat(); err == nil {
			now, serr := os.Stat(filepath.Join(r.path, lockDir))
			ok = serr == nil && os.SameFile(held, now)
		}
	}
	if err != nil || !ok {
		l.close()
		return nil, err
	}
	return l, nil
}

// Unlock releases the lock. It removes empty directories and an empty root: a host without weir's pins keeps no trace of
// it.
func (l *WriteLock) Unlock() {
	if l.dir == nil {
		return
	}
	inUse := false
	scopes, _ := l.allNames(l.path)
	for _, s := range scopes {
		if s == lockDir {
			continue
		}
		features, _ := l.allNames(filepath.Join(l.path, s))
		for _, f := range features {
			os.Remove(filepath.Join(l.path, s, f)) // fails unless empty, as intended
		}
		inUse = os.Remove(filepath.Join(l.path, s)) != nil || inUse
	}
	if !inUse {
		l.closeRecords(l.device())
		os.Remove(filepath.Join(l.path, lockDir))
		os.Remove(l.path)
	}
	l.close()
}

func (l *WriteLock) close() {
	if l.counted {
		l.counted = false
		writing.now.Add(-1)
	}
	l.dir.Close()
	l.dir = nil
}

// SetGroup gives a group read access to all pins and records: directories get mode 0750, maps and files 0640. Links stay
// private to the owner. The kernel opens a link only for writing, and a writer may detach it.
func (l *WriteLock) SetGroup(gid int) error {
	if err := os.Chown(l.path, -1, gid); err != nil {
		return fmt.Errorf("give %s to group %d: %w", l.path, gid, err)
	}
	give := func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.Name() == lockDir {
			return fs.SkipDir // private to the owner
		}
		return setRights(path, d.IsDir(), gid)
	}
	if err := filepath.WalkDir(l.path, give); err != nil {
		return err
	}
	return filepath.WalkDir(l.recordsPath(), func(path string, d fs.DirEntry, err error) error {
		if err = give(path, d, err); errors.Is(err, os.ErrNotExist) {
			return nil // weir serve replaces and removes remarks without the lock
		}
		return err
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

// Interrupted is the error of a change ended by INT or TERM. It wraps the context's error.
type Interrupted struct {
	Became string // outcome of the change: "nothing was changed", or "half done: " and the remedy
	Err    error
}

func (e *Interrupted) Error() string {
	if strings.HasPrefix(e.Became, "half done") {
		return e.Became
	}
	return "interrupted: " + e.Became
}

// Unwrap returns the context's error.
func (e *Interrupted) Unwrap() error { return e.Err }

// Stopped wraps err as [Interrupted] if the end of ctx caused it and it has no outcome yet.
func Stopped(ctx context.Context, err error, became string) error {
	if err == nil || ctx.Err() == nil || !errors.Is(err, ctx.Err()) {
		return err
	}
	if _, told := errors.AsType[*Interrupted](err); told {
		return err
	}
	return &Interrupted{became, err}
}

// writing counts the write locks of this process: held now, and ever held.
var writing struct{ now, ever atomic.Int64 }

// Writing reports whether this process holds a write lock, and whether it ever held one. A process about to exit learns
// from it whether a change may be half done.
func Writing() (now, ever bool) { return writing.now.Load() > 0, writing.ever.Load() > 0 }
