// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"sync"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/bounded"
)

// closer closes descriptors whose close(2) may block:
//
//   - a TCP socket with SO_LINGER and data not taken by its peer
//   - a Unix socket with such a socket in its queue
//   - a file of a hanging file system
//
// [bounded.Interrupt] ends the wait for sockets. Each wait needs a thread, so their number is
// limited. The other descriptors stay open meanwhile. A terminating process waits for none of them,
// because the kernel does not linger then.
type closer struct {
	mu      sync.Mutex
	room    *sync.Cond // signalled when waiting gets shorter
	running int
	waiting []int
}

const (
	maxClosers = 32 // blocked threads
	maxWaiting = 64 // descriptors of unknown peers without a thread
)

// strangers closes passed and rejected descriptors. kept closes duplicates of sessions. Neither
// delays the other.
var strangers, kept = newCloser(), newCloser()

func newCloser() *closer {
	c := &closer{}
	c.room = sync.NewCond(&c.mu)
	return c
}

// close closes a descriptor on another thread.
func (c *closer) close(fd int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.start(fd)
}

// start is close with mu held.
func (c *closer) start(fd int) {
	if c.running == maxClosers {
		c.waiting = append(c.waiting, fd)
		return
	}
	c.running++
	go c.run(fd)
}

// closeBounded is close, but waits while too many descriptors have no thread. Otherwise a stranger
// blocking all threads could use up the process's descriptors.
func (c *closer) closeBounded(fd int) {
	c.mu.Lock()
	full := c.running == maxClosers
	c.mu.Unlock()
	if full && nolinger(fd) {
		closeNow(fd) // a socket needs no thread
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

// closeNow closes a descriptor. It blocks only briefly, unless a file system hangs.
func closeNow(fd int) { bounded.Interrupt(func() { unix.Close(fd) }) }

// CloseKept closes the kept duplicate of a party's connection, with a reset if reset is set. It may
// be called under a lock, because it waits at most a second while the socket's owner holds the
// socket's lock. The owner can set SO_LINGER at any time.
func CloseKept(party string, fd int, reset bool) {
	_ = bounded.Run(party, func() error { // the close follows in any case
		if reset {
			return unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}) // fails for an unconnected socket: nothing to reset
		}
		if l, err := unix.GetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER); err == nil && l.Linger > 0 {
			nolinger(fd)
		}
		return nil
	})
	kept.close(fd)
}

// nolinger makes the close of an IP socket non-blocking. The kernel then sends the remaining data
// by itself. It reports success.
func nolinger(fd int) bool {
	domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	return err == nil && (domain == unix.AF_INET || domain == unix.AF_INET6) &&
		unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{}) == nil
}

// lingers reports whether closing a descriptor may block.
func lingers(fd int) bool {
	domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	switch {
	case err == unix.ENOTSOCK:
		var st unix.Statfs_t // closing a memfd, a pipe or an anonymous file does not block
		return unix.Fstatfs(fd, &st) != nil || st.Type != unix.TMPFS_MAGIC && st.Type != unix.PIPEFS_MAGIC && st.Type != unix.ANON_INODE_FS_MAGIC
	case err != nil:
		return true
	case domain == unix.AF_UNIX:
		return true
	}
	l, err := unix.GetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER)
	return err != nil || l.Onoff != 0 && l.Linger > 0
}
