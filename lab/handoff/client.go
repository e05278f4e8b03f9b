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

// client is a stream in both directions with verification of every byte.
type client struct {
	net.Conn
	remote string // address as seen by servers

	size  int           // maximum of a message
	pause time.Duration // between two
	seed  uint64
	dense atomic.Bool // more often, see densely

	mu       sync.Mutex
	told     uint64
	heard    uint64
	arrivals []time.Time // times of reads, by the kernel's clock
	err      error

	end  context.CancelFunc
	done sync.WaitGroup

	// The fields below belong to the pump.
	rand *rand.Rand
	fd   int
	out  []byte    // unwritten rest of the message
	want []byte    // answers to the written part
	last time.Time // time of the last write or read
}

// streamSize is the maximum size of a message in a stream of small ones.
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

// patience is the timeout for required events, longer than a stall of the machine.
const patience = 30 * time.Second

// verdict is the result of a stream.
type verdict struct {
	bytes            uint64
	lost, duplicated uint64
	reset            bool
	err              error
}

// finish ends the stream: all answers must have arrived, and nothing after them.
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

// gap returns the longest time between two arrivals overlapping a period. Call it after the last arrival:
// an unfinished gap would be missed.
func (c *client) gap(from, to time.Time) time.Duration {
	began, ended := c.longestGap(from, to)
	return ended.Sub(began)
}

// longestGap returns the begin and end of this gap.
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
