// SPDX-License-Identifier: Apache-2.0

package handofflab

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"sort"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// client is a stream in both directions whose every byte is verified.
type client struct {
	net.Conn
	remote string // as servers call it

	size  int           // of a message, at most
	pause time.Duration // between two
	seed  uint64
	dense atomic.Bool // more often, see densely

	mu       sync.Mutex
	told     uint64
	heard    uint64
	arrivals []time.Time // of what each read returned, by the kernel's clock
	err      error

	end  context.CancelFunc
	done sync.WaitGroup

	// The pump's own.
	rand *rand.Rand
	fd   int
	out  []byte    // of the message, what is not written yet
	want []byte    // the answers to what was
	last time.Time // something was written or read
}

// streamSize is that of a message of a stream of small ones, at most.
const streamSize = 2000

// dial connects a client to the service.
func (w *world) dial(seed uint64) (*client, error) {
	c := &client{size: streamSize, pause: time.Millisecond, seed: seed}
	err := w.client.Do(func() (err error) {
		d := net.Dialer{Timeout: patience}
		c.Conn, err = d.Dial("tcp", serviceAt.String())
		return err
	})
	if err != nil {
		return nil, err
	}
	w.env.OnClose(func() { c.Close() })
	a := c.LocalAddr().(*net.TCPAddr).AddrPort()
	c.remote = netip.AddrPortFrom(a.Addr().Unmap(), a.Port()).String()
	return c, nil
}

func (c *client) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.err = errors.Join(c.err, err)
}

// patience is how long what must happen may take: longer than the machine stands still.
const patience = 30 * time.Second

// verdict is what became of a stream.
type verdict struct {
	bytes            uint64
	lost, duplicated uint64
	reset            bool
	err              error
}

// finish ends the stream: every answer must have come, and nothing after it.
func (c *client) finish() verdict {
	c.end()
	c.done.Wait()
	v := verdict{bytes: c.told + c.heard, err: c.err, reset: errors.Is(c.err, unix.ECONNRESET) || errors.Is(c.err, unix.EPIPE)}
	v.lost = c.told - min(c.told, c.heard)
	if c.err != nil {
		c.Close()
		return v
	}
	if t, ok := c.Conn.(*net.TCPConn); ok {
		_ = t.CloseWrite()
	}
	_ = c.SetReadDeadline(time.Now().Add(patience))
	more, err := io.Copy(io.Discard, c)
	v.duplicated = uint64(more)
	v.err = err
	v.reset = errors.Is(err, unix.ECONNRESET)
	c.Close()
	return v
}

// gap is the longest time between two arrivals that overlaps with a period. Ask when all has arrived: one that had not ended yet
// would not be seen.
func (c *client) gap(from, to time.Time) time.Duration {
	began, ended := c.longestGap(from, to)
	return ended.Sub(began)
}

// longestGap is when that began and ended.
func (c *client) longestGap(from, to time.Time) (began, ended time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	a := c.arrivals
	after := func(t time.Time) int { return sort.Search(len(a), func(i int) bool { return a[i].After(t) }) }
	for i := max(1, after(from)); i < len(a) && a[i-1].Before(to); i++ {
		if a[i].Sub(a[i-1]) > ended.Sub(began) {
			began, ended = a[i-1], a[i]
		}
	}
	return began, ended
}
