// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// lockDir is the directory below the root whose flock is the write lock. Only
// the owner may open it, and who cannot open it cannot lock it: the group that
// reads may open the root, and could block every writer there. bpffs has no
// plain files. The mark keeps it out of every list of instances.
const lockDir = "+lock"

// openLock opens the directory to be locked; nil where the root is gone.
func (r *Root) openLock() (*os.File, error) {
	path := filepath.Join(r.path, lockDir)
	if err := os.Mkdir(path, 0o700); errors.Is(err, os.ErrNotExist) {
		return nil, nil
	} else if err != nil && !errors.Is(err, os.ErrExist) {
		return nil, fmt.Errorf("locking %s: %w: run as root", r.path, err)
	}
	dir, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("locking %s: %w: run as root", r.path, err)
	}
	// A weir that knows of no such directory gives it the rights of the others.
	if err := dir.Chmod(0o700); err != nil {
		dir.Close()
		return nil, fmt.Errorf("locking %s: %w: run as root", r.path, err)
	}
	return dir, nil
}

// tryFlock says whether it got the lock on an open directory.
func tryFlock(dir *os.File) (bool, error) {
	err := unix.Flock(int(dir.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) || errors.Is(err, unix.EINTR) {
		return false, nil
	}
	return err == nil, err
}

// lockRoot locks the root itself, which is all that weir locked before it had a
// lock directory. Whoever holds that lock is waited for only if it is a
// process of the root's owner: anyone else is no weir that writes. It returns
// nil without an error where the lock is to be waited for.
func (r *Root) lockRoot() (*os.File, error) {
	dir, err := os.Open(r.path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	// Twice: between the two questions the holder may have become another.
	for range 2 {
		ok, err := tryFlock(dir)
		if err == nil && !ok {
			var owned bool
			if owned, err = lockedByOwner(dir); err == nil && owned {
				dir.Close()
				return nil, nil
			}
		}
		if err != nil {
			dir.Close()
			return nil, fmt.Errorf("locking %s: %w", r.path, err)
		}
		if ok {
			break
		}
	}
	return dir, nil
}

// lockedByOwner says whether a process of the directory's owner holds a flock on
// it, as proc_locks(5) tells.
func lockedByOwner(dir *os.File) (bool, error) {
	info, err := dir.Stat()
	if err != nil {
		return false, err
	}
	st := info.Sys().(*syscall.Stat_t)
	file := fmt.Sprintf("%02x:%02x:%d", unix.Major(st.Dev), unix.Minor(st.Dev), st.Ino)
	locks, err := os.ReadFile("/proc/locks")
	if errors.Is(err, fs.ErrNotExist) {
		return true, nil // a kernel or a container that does not say: wait, as ever
	} else if err != nil {
		return false, err
	}
	for line := range strings.Lines(string(locks)) {
		f := strings.Fields(line) // "1: FLOCK ADVISORY WRITE PID MAJ:MIN:INODE 0 EOF"
		if len(f) >= 6 && f[1] == "FLOCK" && f[5] == file && ownedBy(f[4], st.Uid) {
			return true, nil
		}
	}
	return false, nil
}

// ownedBy says whether a process runs as a user. The owner of /proc/PID would
// not do: it is root for every process that is not dumpable.
func ownedBy(pid string, uid uint32) bool {
	status, err := os.ReadFile("/proc/" + pid + "/status")
	if err != nil {
		return false // it has exited, and its lock with it or with a child that inherited it
	}
	for line := range strings.Lines(string(status)) {
		if ids, ok := strings.CutPrefix(line, "Uid:"); ok {
			f := strings.Fields(ids) // real, effective, saved, file system
			return len(f) == 4 && f[1] == strconv.FormatUint(uint64(uid), 10)
		}
	}
	return false
}
