// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// incarnation is what is known of the other side's.
type incarnation struct {
	heard      atomic.Int64 // since began, ns
	unanswered atomic.Int32 // pings since
	queued     atomic.Int64 // bytes that the other kernel had not taken at the last ping
}

// began is what heard counts from, by a clock that nobody sets.
var began = time.Now()

func (l *incarnation) note() {
	l.heard.Store(int64(time.Since(began)))
	l.unanswered.Store(0)
}

// Ping asks the other side for a sign of life: its Receive answers, here Heard moves on, and nothing is unanswered any more.
func (c *Conn) Ping() error {
	queued := c.queued()
	if was := c.incarnation.queued.Swap(queued); queued >= was { // else it takes what was sent before, and comes to the ping later
		c.incarnation.unanswered.Add(1)
	}
	return c.write(typePing, nil, nil)
}

// Heard is when anything last came from the other side. It can be compared with the time by what has passed since alone.
func (c *Conn) Heard() time.Time { return began.Add(time.Duration(c.incarnation.heard.Load())) }

// Silence is for how long nothing has come from the other side, 0: less than three times
// the pace of pings.
func (c *Conn) Silence(every time.Duration) time.Duration {
	if d := time.Since(c.Heard()); d > 3*every {
		return d
	}
	return 0
}

// Unanswered is how many pings were sent since. Who judges by the time alone takes another for silent after it has stood still
// itself.
func (c *Conn) Unanswered() int { return int(c.incarnation.unanswered.Load()) }

// queued is how many bytes were sent and not taken by the other side's kernel.
func (c *Conn) queued() int64 {
	n := 0
	if t := c.tcp(); t != nil {
		if raw, err := t.SyscallConn(); err == nil {
			_ = raw.Control(func(fd uintptr) { n, _ = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) })
		}
	}
	return int64(n)
}
