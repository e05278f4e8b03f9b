// SPDX-License-Identifier: Apache-2.0

// Package safefile reads files at paths writable by another user: pid files, lists of devices and
// prefixes, files of daemons. With [os.Open] at such a path, a root process may wait forever (a
// FIFO) or acquire a terminal. It may read a secret file (a symbolic link), or read endlessly.
package safefile

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// ErrRefused is wrapped by errors about existing files rejected by this package. They never quote
// the file's contents.
var ErrRefused = errors.New("refused")

const (
	maxLinks = 40 // as the kernel's MAXSYMLINKS
	// readTime is the time limit for a file. A file system of another user (FUSE) may never answer.
	readTime = 2 * time.Second
)

// File is the contents and metadata of a file.
type File struct {
	Data []byte
	UID  uint32 // owner
	GID  uint32
	Mode os.FileMode
	// Links is the number of the file's names.
	Links uint64
}

// Trusted reports whether the file belongs to root or to this process's user and is not
// world-writable. Its contents may then name objects of other users. systemd has the same rule for
// PID files (CVE-2018-16888).
func (f *File) Trusted() bool { return ours(f.UID) && f.Mode.Perm()&0o002 == 0 }

// Public reports whether errors may quote the file. It must be world-readable or have no other
// name. With another name it might be a secret from another directory (if the sysctl
// fs.protected_hardlinks is 0).
func (f *File) Public() bool { return f.Mode.Perm()&0o004 != 0 || f.Links == 1 }

// Read reads a regular file of at most most bytes. It follows symbolic links owned by root or this
// process's user. For a missing file the error wraps [os.ErrNotExist], for a rejected one
// [ErrRefused].
func Read(path string, most int64) (*File, error) {
	return Within(path, func() (*File, error) { return read(path, most) })
}

func read(path string, most int64) (*File, error) {
	f, st, err := openFile(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if st.Size > most {
		return nil, tooLarge(path, most)
	}
	data, err := io.ReadAll(io.LimitReader(f, most+1))
	if err != nil {
		return nil, err
	}
	if int64(len(data)) > most {
		return nil, tooLarge(path, most)
	}
	out := fileOf(st)
	out.Data = data
	return &out, nil
}

// openFile opens a regular file.
func openFile(path string) (*os.File, *unix.Stat_t, error) {
	fd, err := open(path)
	if err != nil {
		return nil, nil, err
	}
	f := os.NewFile(uintptr(fd), path)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		f.Close()
		return nil, nil, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		f.Close()
		return nil, nil, fmt.Errorf("%s: %w: %s, and not a regular file", path, ErrRefused, kind(st.Mode))
	}
	return f, &st, nil
}

func fileOf(st *unix.Stat_t) File {
	return File{UID: st.Uid, GID: st.Gid, Mode: os.FileMode(st.Mode & 0o7777), Links: uint64(st.Nlink)}
}

func tooLarge(path string, most int64) error {
	return fmt.Errorf("%s: %w: it has more than %d bytes", path, ErrRefused, most)
}

// open opens a file without waiting for it, and without links of others. It opens each component by
// itself, so the checked link is the followed one.
func open(path string) (int, error) {
	dir, rest := unix.AT_FDCWD, path
	closeDir := func() {
		if dir >= 0 {
			unix.Close(dir)
		}
	}
	defer func() { closeDir() }()
	var here device
	fail := func(err error) (int, error) { return -1, &os.PathError{Op: "open", Path: path, Err: err} }
	enter := func(fd int) {
		closeDir()
		dir = fd
	}
	if strings.HasPrefix(rest, "/") {
		root, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return fail(err)
		}
		enter(root)
	}
	for links := 0; ; {
		rest = strings.TrimLeft(rest, "/")
		name, after, more := strings.Cut(rest, "/")
		if name == "" {
			return fail(unix.EISDIR)
		}
		fd, err := unix.Openat(dir, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			return fail(err)
		}
		if err := here.enter(fd, path); err != nil {
			unix.Close(fd)
			return -1, err
		}
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			unix.Close(fd)
			return fail(err)
		}
		if st.Mode&unix.S_IFMT == unix.S_IFLNK {
			target, err := readLink(fd)
			unix.Close(fd)
			if links++; links > maxLinks {
				return fail(unix.ELOOP)
			}
			if err != nil {
				return fail(err)
			}
			if !ours(st.Uid) {
				return -1, fmt.Errorf("%s: %w: %s is a symbolic link of user %d", path, ErrRefused, name, st.Uid)
			}
			if rest = target; more {
				rest += "/" + after
			}
			if strings.HasPrefix(target, "/") {
				root, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
				if err != nil {
					return fail(err)
				}
				enter(root)
			}
			continue
		}
		if more {
			enter(fd)
			rest = after
			continue
		}
		defer unix.Close(fd)
		if st.Mode&unix.S_IFMT != unix.S_IFREG { // never opened: that may act on a device, or wait for a FIFO
			return -1, fmt.Errorf("%s: %w: %s, and not a regular file", path, ErrRefused, kind(st.Mode))
		}
		if isKernels(fd) {
			return -1, fmt.Errorf("%s: %w: it is a kernel file", path, ErrRefused)
		}
		opened, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd), unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
		if err != nil {
			return fail(err)
		}
		return opened, nil
	}
}

// readLink returns the target of the link behind an O_PATH descriptor.
func readLink(fd int) (string, error) {
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(fd, "", buf)
	if err != nil {
		return "", err
	}
	if n == 0 || n == len(buf) {
		return "", unix.ENAMETOOLONG
	}
	return string(buf[:n]), nil
}

func ours(uid uint32) bool { return uid == 0 || int(uid) == os.Geteuid() }

func kind(mode uint32) string {
	switch mode & unix.S_IFMT {
	case unix.S_IFIFO:
		return "it is a FIFO"
	case unix.S_IFSOCK:
		return "it is a socket"
	case unix.S_IFDIR:
		return "it is a directory"
	case unix.S_IFBLK, unix.S_IFCHR:
		return "it is a device"
	}
	return "it is something else"
}
