// SPDX-License-Identifier: Apache-2.0

package bounded

import (
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// longestClose is the time limit for the last close of another user's file: see [Interrupt].
const longestClose = 20 * time.Millisecond

// call is a call run by [Interrupt].
type call struct {
	tid int

	mu    sync.Mutex
	timer *time.Timer
	done  bool
}

// Interrupt runs a system call with a possibly blocking close of another user's files. read(2) and
// recvmsg(2) close passed descriptors without a receiver. close(2) of a Unix socket closes the
// descriptors in its queue. The last close of a TCP socket with SO_LINGER waits for its peer in the
// calling thread, for any time. A signal ends this wait, and the kernel sends the rest by itself.
// The signal is SIGURG, because Go's runtime uses it for preemption and accepts it at any moment.
// It is sent each 20 ms until f returns. A hanging file system (FUSE) may still block.
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
		return // the thread has other work now
	}
	_ = unix.Tgkill(unix.Getpid(), c.tid, unix.SIGURG) // the thread exists: it is in f
	c.timer.Reset(longestClose)
}

func (c *call) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.done = true
	c.timer.Stop()
}
