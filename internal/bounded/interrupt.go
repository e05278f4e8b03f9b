// SPDX-License-Identifier: Apache-2.0

package bounded

import (
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// longestClose is how long the last close of another user's file may wait: see [Interrupt].
const longestClose = 20 * time.Millisecond

// call is one that [Interrupt] runs.
type call struct {
	tid int

	mu    sync.Mutex
	timer *time.Timer
	done  bool
}

// Interrupt runs a system call that may drop the last reference to files of another user: read(2) and recvmsg(2) drop passed
// descriptors that nobody receives, close(2) those in the queue of a Unix socket. A TCP socket with SO_LINGER then waits for
// its peer, for as long as its owner likes, in the calling thread. A signal ends this wait; the kernel sends the rest by
// itself. The signal is SIGURG, which Go's runtime sends itself to preempt goroutines, and takes at any moment. It is sent
// each 20 ms until f returns. A file system that does not answer (FUSE) may wait on.
func Interrupt(f func()) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	c := &call{tid: unix.Gettid()}
	c.mu.Lock()
	c.timer = time.AfterFunc(longestClose, c.signal)
	c.mu.Unlock()
	defer c.end()
	f()
}

func (c *call) signal() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.done {
		return // the thread does something else now
	}
	_ = unix.Tgkill(unix.Getpid(), c.tid, unix.SIGURG) // the thread is there: it is in f
	c.timer.Reset(longestClose)
}

func (c *call) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.done = true
	c.timer.Stop()
}
