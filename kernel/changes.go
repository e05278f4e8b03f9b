// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Changes tells when somebody has let go of the write lock of a pin root: then what is pinned may have changed. It
// hears of everybody who waited for the lock, too, and of its own process. It is an inotify watch (inotify(7)) on the
// directory that is locked, so that writers need not know of it, and one that was killed is heard as well.
type Changes struct {
	// C receives after a change, once for several that were not yet received.
	C    <-chan struct{}
	file *os.File
	path string
}

// Changes begins to watch for changes. The error says why the host has no watch left for us: then look from time to
// time.
func (r *Root) Changes() (*Changes, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("inotify: %w: see fs.inotify.max_user_instances", err)
	}
	heard := make(chan struct{}, 1)
	c := &Changes{C: heard, file: os.NewFile(uintptr(fd), "inotify"), path: filepath.Join(r.path, lockDir)}
	if err := c.Renew(); err != nil {
		c.Close()
		return nil, err
	}
	go c.read(heard)
	return c, nil
}

// Renew watches the lock that is there now: a root that was emptied has gone, with its lock, and the next writer
// makes another. It costs one call into the kernel if nothing has changed.
func (c *Changes) Renew() error {
	conn, err := c.file.SyscallConn()
	if err != nil {
		return err
	}
	var added error
	if err := conn.Control(func(fd uintptr) {
		// The same directory is not watched twice.
		_, added = unix.InotifyAddWatch(int(fd), c.path, unix.IN_CLOSE_NOWRITE|unix.IN_ONLYDIR)
	}); err != nil {
		return err
	}
	if added != nil && !errors.Is(added, unix.ENOENT) {
		return fmt.Errorf("inotify: watching %s: %w", c.path, added)
	}
	return nil
}

func (c *Changes) read(heard chan<- struct{}) {
	buf := make([]byte, 4096)
	for {
		// What happened does not matter, only that something did.
		if _, err := c.file.Read(buf); err != nil {
			return // closed
		}
		select {
		case heard <- struct{}{}:
		default:
		}
	}
}

// Close ends the watching.
func (c *Changes) Close() { c.file.Close() }
