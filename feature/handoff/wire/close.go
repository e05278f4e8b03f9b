// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"sync"

	"golang.org/x/sys/unix"
)

// closer closes descriptors whose close(2) may wait: a TCP socket with SO_LINGER and data that its peer does not take, a Unix
// socket with such a socket in its queue, a file of a file system that does not answer. Each wait takes a thread, so that
// there are few at once; the others stay open meanwhile. A process that ends waits for none of them: the kernel does not
// linger for it.
type closer struct {
	mu      sync.Mutex
	running int
	waiting []int
}

// maxClosers bounds the threads that wait.
const maxClosers = 32

var strangers closer

func (c *closer) close(fd int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.running == maxClosers {
		c.waiting = append(c.waiting, fd)
		return
	}
	c.running++
	go c.run(fd)
}

func (c *closer) run(fd int) {
	for {
		unix.Close(fd)
		c.mu.Lock()
		if len(c.waiting) == 0 {
			c.running--
			c.mu.Unlock()
			return
		}
		fd, c.waiting = c.waiting[0], c.waiting[1:]
		c.mu.Unlock()
	}
}

// lingers says whether closing a descriptor may wait.
func lingers(fd int) bool {
	domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	switch {
	case err == unix.ENOTSOCK:
		var st unix.Statfs_t // a memfd's does not, a pipe's and an anonymous file's neither
		return unix.Fstatfs(fd, &st) != nil || st.Type != unix.TMPFS_MAGIC && st.Type != unix.PIPEFS_MAGIC && st.Type != unix.ANON_INODE_FS_MAGIC
	case err != nil:
		return true
	case domain == unix.AF_UNIX:
		return true
	}
	l, err := unix.GetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER)
	return err != nil || l.Onoff != 0 && l.Linger > 0
}
