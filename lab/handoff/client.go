// SPDX-License-Identifier: Apache-2.0

package handofflab

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"runtime"
	"sort"
	"sync"
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

	mu       sync.Mutex
	told     uint64
	heard    uint64
	arrivals []time.Time // of what each read returned, by the kernel's clock
	err      error

	end  context.CancelFunc
	done sync.WaitGroup
	said chan []byte
}

// dial connects a client to the service.
func (w *world) dial(seed uint64) (*client, error) {
	c := &client{size: 2000, pause: 500 * time.Microsecond, seed: seed, said: make(chan []byte, 1<<14)}
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

// stream talks until finish.
func (c *client) stream(ctx context.Context) {
	ctx, c.end = context.WithCancel(ctx)
	c.done.Go(func() { c.fail(c.speak(ctx)) })
	c.done.Go(func() { c.fail(c.listen()) })
}

func (c *client) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.err = errors.Join(c.err, err)
}

func (c *client) speak(ctx context.Context) error {
	defer close(c.said)
	runtime.LockOSThread() // the runtime's timers, of a millisecond and more, would be gaps of the stream's
	defer runtime.UnlockOSThread()
	pause := unix.NsecToTimespec(c.pause.Nanoseconds())
	r := rand.New(rand.NewPCG(c.seed, 1))
	for ctx.Err() == nil {
		b := make([]byte, 0, c.size+8)
		for n := 1 + r.IntN(c.size); len(b) < n; {
			b = binary.LittleEndian.AppendUint64(b, r.Uint64())
		}
		c.said <- b
		if err := c.SetWriteDeadline(time.Now().Add(patience)); err != nil {
			return err
		}
		n, err := c.Write(b)
		c.mu.Lock()
		c.told += uint64(n)
		c.mu.Unlock()
		if err != nil {
			return fmt.Errorf("say: %w", err)
		}
		_ = unix.Nanosleep(&pause, nil)
	}
	return nil
}

// patience is how long what must happen may take: longer than the machine stands still.
const patience = 30 * time.Second

func (c *client) listen() error {
	got := make([]byte, 64<<10)
	var want []byte
	r, err := newStamped(c.Conn)
	if err != nil {
		return err
	}
	open := true
	for {
		for open && len(want) == 0 {
			var b []byte
			if b, open = <-c.said; open {
				want = append(want, b...)
				scramble(want, c.heard)
			}
		}
		if !open && len(want) == 0 {
			return nil
		}
		if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
			return err
		}
		n, now, err := r.read(got[:min(len(want), len(got))])
		for i, b := range got[:n] {
			if b != want[i] {
				return fmt.Errorf("byte %d is wrong", c.heard+uint64(i))
			}
		}
		want = want[n:]
		c.mu.Lock()
		c.heard += uint64(n)
		if n > 0 {
			c.arrivals = append(c.arrivals, now)
		}
		c.mu.Unlock()
		if err != nil {
			return fmt.Errorf("hear, after byte %d: %w", c.heard, err)
		}
	}
}

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
func (c *client) gap(from, to time.Time) (longest time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	a := c.arrivals
	after := func(t time.Time) int { return sort.Search(len(a), func(i int) bool { return a[i].After(t) }) }
	for i := max(1, after(from)); i < len(a) && a[i-1].Before(to); i++ {
		longest = max(longest, a[i].Sub(a[i-1]))
	}
	return longest
}
