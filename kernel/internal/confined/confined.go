// SPDX-License-Identifier: Apache-2.0

// Package confined changes files below directories of another user. This user may put a link in place of any file or
// directory there. All changes go through [os.Root], which follows no link out of the directory.
package confined

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/weir-project/weir/internal/users"
	"golang.org/x/sys/unix"
)

// MaxFile is the usual limit of a file in bytes. A record has some 100 bytes for each link, and there are hosts with
// 100,000 devices.
const MaxFile = 16 << 20

// Dirs are the directories. Their parents must belong to root.
type Dirs []string

// Prepare creates a directory if it is missing, and gives it to a user.
func Prepare(dir string, user, group int) error {
	// In a directory of another user the new one could become a link.
	var above syscall.Stat_t
	if err := syscall.Stat(filepath.Dir(dir), &above); err != nil {
		return fmt.Errorf("prepare %s: %w", dir, err)
	} else if above.Uid != 0 {
		return fmt.Errorf("prepare %s: user %d owns the directory above: chown it to root", dir, above.Uid)
	}
	if err := os.Mkdir(dir, 0o755); err == nil {
		err = os.Chmod(dir, 0o755) // against the umask: members and clients reach sockets there
		if err != nil {
			return fmt.Errorf("prepare: %w", err)
		}
	} else if !os.IsExist(err) {
		return fmt.Errorf("prepare: %w", err)
	}
	if err := os.Lchown(dir, user, group); err != nil {
		return fmt.Errorf("give %s to user %d: %w: run as root", dir, user, err)
	}
	return nil
}

// of returns the directory of a path.
func (d Dirs) of(path string) (string, error) {
	for _, dir := range d {
		if path == dir || strings.HasPrefix(path, dir+"/") {
			return dir, nil
		}
	}
	return "", &os.PathError{Op: "open", Path: path, Err: fmt.Errorf("outside %q", []string(d))}
}

// inside calls f with the directory of a path, and the rest of the path.
func (d Dirs) inside(path string, f func(dir *os.Root, rel string) error) error {
	base, err := d.of(path)
	if err != nil {
		return err
	}
	rel, err := filepath.Rel(base, path)
	if err != nil {
		return err
	}
	dir, err := os.OpenRoot(base)
	if err != nil {
		return err
	}
	defer dir.Close()
	return f(dir, rel)
}

// Remove removes a file or an empty directory.
func (d Dirs) Remove(path string) error {
	return d.inside(path, func(dir *os.Root, rel string) error { return dir.Remove(rel) })
}

// RemoveAll removes a directory with its contents, or anything else. A missing path is not an error.
func (d Dirs) RemoveAll(path string) error {
	return d.inside(path, func(dir *os.Root, rel string) error { return dir.RemoveAll(rel) })
}

// Mkdir creates a directory.
func (d Dirs) Mkdir(path string, mode os.FileMode) error {
	return d.inside(path, func(dir *os.Root, rel string) error { return dir.Mkdir(rel, mode) })
}

// MkdirAll creates a directory and its parents.
func (d Dirs) MkdirAll(path string, mode os.FileMode) error {
	return d.inside(path, func(dir *os.Root, rel string) error { return dir.MkdirAll(rel, mode) })
}

// Rename renames within one of the directories.
func (d Dirs) Rename(from, to string) error {
	return d.inside(from, func(dir *os.Root, rel string) error {
		base, err := d.of(from)
		if err == nil {
			to, err = filepath.Rel(base, to)
		}
		if err != nil {
			return err
		}
		return dir.Rename(rel, to)
	})
}

// Renameat2 renames within the parent directory of from, with flags.
func (d Dirs) Renameat2(from, to string, flags uint) error {
	dir, err := d.OpenDir(filepath.Dir(from))
	if err != nil {
		return err
	}
	defer dir.Close()
	return unix.Renameat2(int(dir.Fd()), filepath.Base(from), int(dir.Fd()), filepath.Base(to), flags)
}

// ReadDir returns the entries of a directory, sorted by name.
func (d Dirs) ReadDir(path string) ([]os.DirEntry, error) {
	f, err := d.OpenDir(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	out, err := f.ReadDir(-1)
	slices.SortFunc(out, func(a, b os.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
	return out, err
}

// Names returns the names in a directory, or none if it is unreadable.
func (d Dirs) Names(path string) (out []string) {
	entries, _ := d.ReadDir(path)
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

// OpenDir opens a directory.
func (d Dirs) OpenDir(path string) (f *os.File, err error) {
	err = d.inside(path, func(dir *os.Root, rel string) error {
		f, err = dir.OpenFile(rel, os.O_RDONLY|syscall.O_DIRECTORY, 0)
		return err
	})
	return f, err
}

// OpenFile opens a regular file. It does not wait for a FIFO.
func (d Dirs) OpenFile(path string, flags int, mode os.FileMode) (f *os.File, err error) {
	err = d.inside(path, func(dir *os.Root, rel string) error {
		if f, err = dir.OpenFile(rel, flags|syscall.O_NONBLOCK|syscall.O_NOCTTY, mode); err != nil {
			return err
		}
		st, err := f.Stat()
		if err == nil && !st.Mode().IsRegular() {
			err = &os.PathError{Op: "open", Path: path, Err: errors.New("not a regular file")}
		}
		if err != nil {
			f.Close()
		}
		return err
	})
	return f, err
}

// ReadFile reads a regular file of at most MaxFile bytes.
func (d Dirs) ReadFile(path string) ([]byte, error) { return d.ReadUpTo(path, MaxFile) }

// ReadUpTo reads a regular file of at most most bytes.
func (d Dirs) ReadUpTo(path string, most int) ([]byte, error) {
	f, err := d.OpenFile(path, os.O_RDONLY, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, int64(most)+1))
	if err == nil {
		err = checkSize("read", path, len(b), most)
	}
	if err != nil {
		return nil, err
	}
	return b, nil
}

// checkSize returns an error if a file has more than most bytes.
func checkSize(op, path string, size, most int) error {
	if size <= most {
		return nil
	}
	return &os.PathError{Op: op, Path: path, Err: fmt.Errorf("more than %d MiB", most>>20)}
}

// isDir reports whether path is a directory, and no link to one.
func (d Dirs) isDir(path string) bool {
	is := false
	_ = d.inside(path, func(dir *os.Root, rel string) error {
		st, err := dir.Lstat(rel)
		is = err == nil && st.IsDir()
		return err
	})
	return is
}

// Replace replaces a file atomically, with at most most bytes. give sets the rights of the new one before that. A
// directory in its place is removed first.
func (d Dirs) Replace(path string, b []byte, most int, give func(path string) error) error {
	return d.ReplaceBy(path, most, func(w io.Writer) error { _, err := w.Write(b); return err }, give)
}

// ReplaceBy is Replace with the bytes written by write.
func (d Dirs) ReplaceBy(path string, most int, write func(io.Writer) error, give func(path string) error) error {
	next := path + ".new"
	if err := d.RemoveAll(next); err != nil { // left by a kill, or a link
		return err
	}
	f, err := d.OpenFile(next, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o640)
	if err != nil {
		return err
	}
	err = write(&limited{f, path, most})
	if err = errors.Join(err, f.Close()); err == nil {
		err = give(next)
	}
	if err == nil {
		err = d.Rename(next, path)
	}
	if err != nil && d.isDir(path) {
		if err = d.RemoveAll(path); err == nil {
			err = d.Rename(next, path)
		}
	}
	if err != nil {
		_ = d.Remove(next)
	}
	return err
}

// limited writes at most most bytes of a file.
type limited struct {
	f    *os.File
	path string
	most int
}

func (l *limited) Write(b []byte) (int, error) {
	at, err := l.f.Seek(0, io.SeekCurrent)
	if err == nil {
		err = checkSize("write", l.path, int(at)+len(b), l.most)
	}
	if err != nil {
		return 0, err
	}
	return l.f.Write(b)
}

// Give sets mode, owner and group of a file. -1 is the present owner or group. It changes no right that is already
// there, because a user other than the owner may have none to do so. All calls meet the file opened first, so the owner
// of the directory cannot exchange it in between.
func (d Dirs) Give(path string, mode os.FileMode, uid, gid int) error {
	base, err := d.of(path)
	if err != nil {
		return err
	}
	f, err := Open(base, path)
	if err != nil {
		return err
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return &os.PathError{Op: "stat", Path: path, Err: err}
	}
	owner := uid
	if owner == -1 {
		owner = os.Geteuid()
	}
	// A second name may be in a directory of root: a link to a file that its owner does not give away.
	if st.Mode&unix.S_IFMT != unix.S_IFDIR && st.Nlink > 1 && int(st.Uid) != owner {
		return fmt.Errorf("%s: %w", path, secondName(st.Uid))
	}
	if uid == -1 {
		uid = int(st.Uid)
	}
	if os.FileMode(st.Mode&0o777) != mode {
		if err := unix.Chmod(Name(f), uint32(mode)); err != nil {
			return &os.PathError{Op: "chmod", Path: path, Err: err}
		}
	}
	if int(st.Uid) != uid || gid >= 0 && int(st.Gid) != gid {
		if err := unix.Fchownat(int(f.Fd()), "", uid, gid, unix.AT_EMPTY_PATH); err != nil {
			return users.NotIn(&os.PathError{Op: "chown", Path: path, Err: err}, gid)
		}
	}
	return nil
}
