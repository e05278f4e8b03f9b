// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Changes reports each release of the write lock of a pin root, because pins may have changed then. It also reports
// processes that only waited for the lock, and its own process. It watches the lock directory with inotify(7). Writers
// need not cooperate, and a killed writer is reported too.
type Changes struct {
	// C receives after a change. Several changes before a receive count as one.
	C     <-chan struct{}
	heard chan<- struct{}
	file  *os.File
	path  string
	watch int // of the lock directory; 0: none yet
}

// Changes starts watching. It fails if the host has no inotify watch left: the caller then polls.
func (r *Root) Changes() (*Changes, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("inotify: %w: raise fs.inotify.max_user_instances", err)
	}
	heard := make(chan struct{}, 1)
	c := &Changes{C: heard, heard: heard, file: os.NewFile(uintptr(fd), "inotify"), path: filepath.Join(r.path, lockDir)}
	if _, err := c.renew(); err != nil {
		c.Close()
		return nil, err
	}
	go c.read()
	return c, nil
}

// Renew watches the current lock directory. An emptied root is removed with its lock, and the next writer makes a new
// one. It reports a new directory as a change: its first writer may have released it already. Renew is one system call
// if nothing has changed.
func (c *Changes) Renew() error {
	found, err := c.renew()
	if found {
		c.hear()
	}
	return err
}

// renew reports whether it has found another lock directory than before.
func (c *Changes) renew() (found bool, err error) {
	conn, err := c.file.SyscallConn()
	if err != nil {
		return false, err
	}
	var added error
	watch := 0
	if err := conn.Control(func(fd uintptr) {
		// The kernel does not add a second watch on the same directory, and gives a new one another number.
		watch, added = unix.InotifyAddWatch(int(fd), c.path, unix.IN_CLOSE_NOWRITE|unix.IN_ONLYDIR)
	}); err != nil {
		return false, err
	}
	if errors.Is(added, unix.ENOENT) {
		return false, nil
	} else if added != nil {
		return false, fmt.Errorf("watch %s with inotify: %w", c.path, added)
	}
	found, c.watch = watch != c.watch, watch
	return found, nil
}

// hear reports a change.
func (c *Changes) hear() {
	select {
	case c.heard <- struct{}{}:
	default:
	}
}

func (c *Changes) read() {
	buf := make([]byte, 4096)
	for {
		// Any event means a change.
		if _, err := c.file.Read(buf); err != nil {
			return // closed
		}
		c.hear()
	}
}

// Close stops watching.
func (c *Changes) Close() { c.file.Close() }
