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
	"syscall"
	"time"

	"github.com/weir-project/weir/kernel/internal/confined"
	"github.com/weir-project/weir/kernel/internal/flock"
	"github.com/weir-project/weir/kernel/rights"
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
			if err := errors.Join(l.own(), l.recover(), l.sweep()); err != nil {
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
	ok, err := flock.Try(dir)
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
			l.files().Remove(filepath.Join(l.path, s, f)) // fails unless empty, as intended
		}
		inUse = l.files().Remove(filepath.Join(l.path, s)) != nil || inUse
	}
	if !inUse {
		l.closeRecords(l.device())
		l.files().RemoveAll(filepath.Join(l.path, lockDir)) // with claims of killed processes
		if uid := uid(); uid <= 0 {
			os.Remove(l.path)
		} // else its owner could not create it again
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

// runDir is weir's directory in /run. Pins and records belong to its owner. In the packages that is the user of weir
// serve, not root.
func runDir() string { return filepath.Dir(RecordDir) }

// files are the directories of pins and records. Commands of root follow no link of their owner out of them.
func (r *Root) files() confined.Dirs { return confined.Dirs{r.path, runDir()} }

// uid returns the owner of new pins and records. Only root can choose: -1 is the process's own user.
func uid() int {
	st, err := os.Stat(runDir())
	if err != nil || os.Geteuid() != 0 {
		return -1
	}
	return int(st.Sys().(*syscall.Stat_t).Uid)
}

func (r *Root) give(path string, mode os.FileMode, gid int) error {
	return r.files().Give(path, mode, uid(), gid)
}

// setRights gives a pin or record to the owner and a group.
func (r *Root) setRights(path string, dir bool, gid int) error {
	return r.give(path, rights.Of(path, dir), gid)
}

// Prepare gives pins, records and weir's directory in /run to a user, and creates them if they are missing. A process of
// that user then needs no right over files of others. Commands of root leave later pins and records to the same user.
func (r *Root) Prepare(ctx context.Context, user, group int) error {
	if err := confined.Prepare(runDir(), user, group); err != nil {
		return err
	}
	l, err := r.Lock(ctx) // with the pins of the previous owner
	if err != nil {
		return err
	}
	defer l.close() // Unlock would remove an empty directory of pins, and the user could not create it again
	if err := l.makeRecords(l.recordsPath()); err != nil {
		return err
	}
	return l.SetGroup(cmp.Or(l.gid(), group)) // weir apply chooses another
}

// own gives pins and records to the owner of weir's directory in /run, if it has changed.
func (l *WriteLock) own() error {
	st, err := os.Stat(l.path)
	if owner := uid(); err != nil || owner == -1 || int(st.Sys().(*syscall.Stat_t).Uid) == owner {
		return err
	}
	if _, err := os.Lstat(RecordDir); err == nil {
		if err := l.give(RecordDir, 0o755, -1); err != nil {
			return err
		}
	}
	return l.SetGroup(l.gid())
}

// SetGroup gives a group read access to pins and records without secrets.
func (l *WriteLock) SetGroup(gid int) error {
	if err := l.give(l.path, 0o750, gid); err != nil {
		return fmt.Errorf("give %s to group %d: %w", l.path, gid, err)
	}
	give := func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.Name() == lockDir {
			if err := l.give(path, 0o700, -1); err != nil { // private to the owner
				return err
			}
			return fs.SkipDir
		}
		return l.setRights(path, d.IsDir(), gid)
	}
	err := filepath.WalkDir(l.path, func(path string, d fs.DirEntry, err error) error {
		if own := path == l.path || rights.IsOwn(path[len(l.path)+1:], d.IsDir()); err != nil || own {
			return give(path, d, err)
		} else if d.IsDir() {
			return fs.SkipDir
		}
		return nil
	})
	if err != nil {
		return err
	}
	return filepath.WalkDir(l.recordsPath(), func(path string, d fs.DirEntry, err error) error {
		if err = give(path, d, err); errors.Is(err, confined.ErrPlanted) {
			err = l.files().Remove(path) // the name; nothing of weir's
		}
		if errors.Is(err, os.ErrNotExist) {
			return nil // weir serve replaces and removes remarks without the lock
		}
		return err
	})
}

// Interrupted is the error of a change ended by INT or TERM. It wraps the context's error.
type Interrupted struct {
	Became string // outcome of the change: "nothing was changed", or "half done: " and the remedy
	Err    error
}

func (e *Interrupted) Error() string {
	if e.HalfDone() {
		return e.Became
	}
	return "interrupted: " + e.Became
}

// HalfDone reports whether a part of the change is in force.
func (e *Interrupted) HalfDone() bool { return strings.HasPrefix(e.Became, "half done") }

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
