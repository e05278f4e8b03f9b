// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"sync"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/bounded"
)

// closer closes descriptors whose close(2) may wait: a TCP socket with SO_LINGER and data that its peer does not take, a Unix
// socket with such a socket in its queue, a file of a file system that does not answer. [bounded.Interrupt] ends the wait for
// sockets. Each wait takes a thread, so that there are few at once; the others stay open meanwhile. A process that ends waits for none of them: the kernel does not
// linger for it.
type closer struct {
	mu      sync.Mutex
	room    *sync.Cond // waiting has become shorter
	running int
	waiting []int
}

const (
	maxClosers = 32 // threads that wait
	maxWaiting = 64 // descriptors of strangers that wait for a thread
)

// strangers closes what was passed and refused, kept the duplicates of sessions: one does not hold up the other.
var strangers, kept = newCloser(), newCloser()

func newCloser() *closer {
	c := &closer{}
	c.room = sync.NewCond(&c.mu)
	return c
}

// close closes a descriptor by another thread.
func (c *closer) close(fd int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.start(fd)
}

// start is close, with mu held.
func (c *closer) start(fd int) {
	if c.running == maxClosers {
		c.waiting = append(c.waiting, fd)
		return
	}
	c.running++
	go c.run(fd)
}

// closeBounded is close, but waits while too many descriptors are open for want of a thread. Without this bound a stranger
// who makes all threads wait has every descriptor of the process.
func (c *closer) closeBounded(fd int) {
	c.mu.Lock()
	full := c.running == maxClosers
	c.mu.Unlock()
	if full && nolinger(fd) {
		closeNow(fd) // a socket does without a thread
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(c.waiting) >= maxWaiting {
		c.room.Wait()
	}
	c.start(fd)
}

func (c *closer) run(fd int) {
	for {
		closeNow(fd)
		c.mu.Lock()
		if len(c.waiting) == 0 {
			c.running--
			c.mu.Unlock()
			return
		}
		fd, c.waiting = c.waiting[0], c.waiting[1:]
		c.room.Signal()
		c.mu.Unlock()
	}
}

// closeNow closes a descriptor, and waits for a moment at most, but for a file system that does not answer.
func closeNow(fd int) { bounded.Interrupt(func() { unix.Close(fd) }) }

// CloseKept closes the duplicate of a connection that was kept for a party, with a reset if reset is set. It may be called under
// a lock: it waits for a second at most, where the socket's owner holds the socket's lock. The owner can set SO_LINGER at any
// moment.
func CloseKept(party string, fd int, reset bool) {
	_ = bounded.Run(party, func() error { // else it ends by itself
		if reset {
			return unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}) // of no connection: it ends by itself
		}
		if l, err := unix.GetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER); err == nil && l.Linger > 0 {
			nolinger(fd)
		}
		return nil
	})
	kept.close(fd)
}

// nolinger makes an IP socket one whose close does not wait: the kernel sends the rest by itself. It says whether it has.
func nolinger(fd int) bool {
	domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	return err == nil && (domain == unix.AF_INET || domain == unix.AF_INET6) &&
		unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{}) == nil
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
