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

// WriteLock is the proof that its holder is the only writer of a pin root.
// Whatever changes state is a method of it or takes one.
type WriteLock struct {
	*Root
	dir *os.File // locked

	counted    bool  // in writing
	unrecorded error // why a record could not be written
}

// Lock waits until no other weir command changes the pins below r, then recovers
// what a killed one left half done. It makes the root where it is missing.
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
				return nil, fmt.Errorf("recovering %s: %w", r.path, err)
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

// tryLock returns nil without an error when the lock is taken, or when the
// directory that it took is no longer the one that is there: the last holder may
// have removed an empty root.
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

// Unlock lets the next writer in. Directories left empty go, the root too, so
// that a host from which weir was removed has nothing of it left.
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
			os.Remove(filepath.Join(l.path, s, f)) // fails unless empty, as it should
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

// SetGroup lets the members of a group read every pin and record: directories become
// 0750, maps and files 0640. Links stay the owner's: the kernel opens a link only for
// writing, and a writer may detach it.
func (l *WriteLock) SetGroup(gid int) error {
	if err := os.Chown(l.path, -1, gid); err != nil {
		return fmt.Errorf("giving %s to group %d: %w", l.path, gid, err)
	}
	give := func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.Name() == lockDir {
			return fs.SkipDir // the owner's alone
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

// Interrupted is the error of a change that INT or TERM ended. It wraps the context's error.
type Interrupted struct {
	Became string // what became of the change: "nothing was changed", "half done: " and the remedy
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

// Stopped returns err as an [Interrupted] if it comes from the end of ctx and does not say yet what became of the change.
func Stopped(ctx context.Context, err error, became string) error {
	if err == nil || ctx.Err() == nil || !errors.Is(err, ctx.Err()) {
		return err
	}
	if _, told := errors.AsType[*Interrupted](err); told {
		return err
	}
	return &Interrupted{became, err}
}

// writing counts the locks that this process has, and those that it ever had.
var writing struct{ now, ever atomic.Int64 }

// Writing says whether this process has the lock of a root, and whether it ever had one: who has to end knows by it whether a
// change may be half done.
func Writing() (now, ever bool) { return writing.now.Load() > 0, writing.ever.Load() > 0 }
