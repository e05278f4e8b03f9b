// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/weir-project/weir/kernel/internal/flock"
)

// lockDir is the directory below the root with the flock of the write lock. Only the owner may open it, and locking
// needs an open directory. Readers in the group may open the root, and could block every writer with a lock there. bpffs
// has no plain files. The + keeps the directory out of lists of instances.
const lockDir = "+lock"

// openLock opens the directory to lock. It returns nil if the root is gone.
func (r *Root) openLock() (*os.File, error) {
	path := filepath.Join(r.path, lockDir)
	if err := r.files().Mkdir(path, 0o700); errors.Is(err, os.ErrNotExist) {
		return nil, nil
	} else if err != nil && !errors.Is(err, os.ErrExist) {
		return nil, fmt.Errorf("lock %s: %w: run as root", r.path, err)
	} else if err == nil {
		_ = r.give(path, 0o700, -1) // else root's, and still removable by the owner of the root
	}
	dir, err := r.files().OpenDir(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("lock %s: %w: run as root", r.path, err)
	}
	return dir, nil
}

// Claim makes one process at a time responsible for work on a published instance. It is for slow work, done without the
// write lock. ok is false while another process has the claim. The claim ends with release or with the process, and does
// not pass to another publication of the instance. Only the owner of the pins and root can claim: a reader in the group
// could otherwise keep weir serve from its work.
func (r *Root) Claim(i Instance) (release func(), ok bool, err error) {
	st, err := os.Stat(r.dir(i))
	if err != nil {
		return nil, false, r.explainOpen(r.dir(i), err)
	}
	lock, err := r.openLock() // the directory above
	if lock == nil {
		return nil, false, err
	}
	defer lock.Close()
	path := filepath.Join(r.path, lockDir, fmt.Sprintf("claim_%d", fileInode(st)))
	for range openTries {
		dir, err := r.openClaim(path)
		if dir == nil {
			if err == nil {
				continue // another process has just released it
			}
			return nil, false, err
		}
		if ok, err = flock.Try(dir); err != nil || !ok {
			dir.Close()
			return nil, false, err
		}
		held, err := dir.Stat()
		if now, serr := os.Stat(path); err != nil || serr != nil || !os.SameFile(held, now) {
			dir.Close()
			continue
		}
		return func() {
			_ = r.files().Remove(path)
			dir.Close()
		}, true, nil
	}
	return nil, false, fmt.Errorf("claim %s: other processes claim and release it", i)
}

// openClaim opens the directory of a claim. It returns nil if another process has removed it meanwhile.
func (r *Root) openClaim(path string) (*os.File, error) {
	if err := r.files().Mkdir(path, 0o700); err == nil {
		_ = r.give(path, 0o700, -1)
	} else if !errors.Is(err, os.ErrExist) {
		return nil, fmt.Errorf("claim %s: %w: run as root", path, err)
	}
	dir, err := r.files().OpenDir(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("claim %s: %w: run as root", path, err)
	}
	return dir, nil
}
