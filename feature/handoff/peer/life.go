// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// incarnation tracks signs of life of the other side.
type incarnation struct {
	heard      atomic.Int64 // time of the latest frame since began, ns
	unanswered atomic.Int32 // pings since then
	queued     atomic.Int64 // bytes in the send queue at the latest ping
}

// began is the origin of heard. Its monotonic clock cannot be set.
var began = time.Now()

func (l *incarnation) note() {
	l.heard.Store(int64(time.Since(began)))
	l.unanswered.Store(0)
}

// Ping sends a ping. The other side's Receive answers it. The answer advances Heard and resets
// Unanswered.
func (c *Conn) Ping() error {
	queued := c.queued()
	if was := c.incarnation.queued.Swap(queued); queued >= was { // otherwise the other side is still reading older frames, and reaches the ping later
		c.incarnation.unanswered.Add(1)
	}
	return c.write(typePing, nil, nil)
}

// Heard returns the time of the latest frame from the other side. It is only meaningful relative to
// the present time.
func (c *Conn) Heard() time.Time { return began.Add(time.Duration(c.incarnation.heard.Load())) }

// Silence returns the time since the latest frame from the other side, 0 if it is less than three
// ping intervals.
func (c *Conn) Silence(every time.Duration) time.Duration {
	if d := time.Since(c.Heard()); d > 3*every {
		return d
	}
	return 0
}

// Unanswered returns the number of pings since the latest frame. Time alone would make a peer look
// silent after this process itself was suspended.
func (c *Conn) Unanswered() int { return int(c.incarnation.unanswered.Load()) }

// queued returns the number of bytes in the send queue, not acknowledged by the other kernel.
func (c *Conn) queued() int64 {
	n := 0
	if t := c.tcp(); t != nil {
		if raw, err := t.SyscallConn(); err == nil {
			_ = raw.Control(func(fd uintptr) { n, _ = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) })
		}
	}
	return int64(n)
}
