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
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// stream runs the clients until finish. Clients of one call share one thread, woken a few times a
// millisecond. Separate threads would use as much of the machine as all servers together, and the clients
// would wait for them.
func stream(ctx context.Context, clients ...*client) error {
	var ends []context.Context
	for _, c := range clients {
		if err := c.open(); err != nil {
			return err
		}
		var end context.Context
		end, c.end = context.WithCancel(ctx)
		ends = append(ends, end)
		c.done.Add(1)
	}
	go pump(clients, ends)
	return nil
}

// open enables the kernel's receive timestamps, and takes the connection out of Go's poller. There each
// packet would wake a thread beside the pump's.
func (c *client) open() error {
	t, ok := c.Conn.(*net.TCPConn)
	if !ok {
		return fmt.Errorf("a %T has no timestamps", c.Conn)
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return err
	}
	cerr := raw.Control(func(fd uintptr) {
		if c.fd, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0); err == nil { // non-blocking, as set by Go
			err = unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPNS_NEW, 1)
		}
	})
	c.rand, c.last = rand.New(rand.NewPCG(c.seed, 1)), time.Now()
	return errors.Join(cerr, err, c.Conn.Close())
}

// shut returns the connection to Go.
func (c *client) shut() error {
	f := os.NewFile(uintptr(c.fd), c.remote)
	defer f.Close()
	conn, err := net.FileConn(f)
	if err == nil {
		c.Conn = conn
	}
	return err
}

func pump(clients []*client, ends []context.Context) {
	buf := make([]byte, 64<<10)
	live := make([]bool, len(clients))
	for i := range live {
		live[i] = true
	}
	tick := clients[0].pause / densely
	for next, ticks := time.Now(), 0; ; {
		var polled []unix.PollFd
		for i, c := range clients {
			if !live[i] {
				continue
			}
			p := unix.PollFd{Fd: int32(c.fd), Events: c.events()}
			if p.Events == 0 {
				p.Fd = -1 // a closed end without a reader would end each wait
			}
			polled = append(polled, p)
		}
		if len(polled) == 0 {
			return
		}
		ts := unix.NsecToTimespec(max(0, time.Until(next).Nanoseconds()))
		_, err := unix.Ppoll(polled, &ts, nil)
		now := time.Now()
		due := !now.Before(next)
		if due {
			next = now.Add(tick)
			if ticks++; ticks%(8*densely) == 0 {
				runtime.Gosched() // Go's monitor takes the P of a goroutine unscheduled for 10 ms, and stays awake for this
			}
		}
		if errors.Is(err, unix.EINTR) {
			err = nil
		}
		for i, c := range clients {
			if !live[i] {
				continue
			}
			ended := ends[i].Err() != nil
			if err == nil {
				err = c.turn(buf, due && !ended && (ticks%densely == 0 || c.dense.Load()), now)
			}
			if err != nil || ended && len(c.out) == 0 && len(c.want) == 0 {
				live[i] = false
				c.fail(errors.Join(err, c.shut()))
				c.done.Done()
			}
			err = nil
		}
	}
}

// densely is the factor of messages from a client with a moving session. The message interval limits the
// resolution of measured gaps.
const densely = 4

// events returns the pump's poll events. Data for a client without a moving session is read at its next
// message. It waits in the kernel with its arrival time.
func (c *client) events() (e int16) {
	if len(c.want) > 0 && (c.dense.Load() || c.size != streamSize) {
		e = unix.POLLIN
	}
	if len(c.out) > 0 {
		e |= unix.POLLOUT
	}
	return e
}

// turn reads and writes as far as possible. due starts a new message if the previous one is written.
func (c *client) turn(buf []byte, due bool, now time.Time) error {
	if err := c.hear(buf); err != nil {
		return err
	}
	if due && len(c.out) == 0 {
		for n := 1 + c.rand.IntN(c.size); len(c.out) < n; {
			c.out = binary.LittleEndian.AppendUint64(c.out, c.rand.Uint64())
		}
	}
	if err := c.speak(); err != nil {
		return err
	}
	if len(c.want) > 0 && now.Sub(c.last) > patience {
		return fmt.Errorf("nothing received or accepted for %s, after byte %d", patience, c.heard)
	}
	return nil
}

func (c *client) speak() error {
	for len(c.out) > 0 {
		n, err := unix.Write(c.fd, c.out)
		if errors.Is(err, unix.EAGAIN) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("write: %w", err)
		}
		at := len(c.want)
		c.want = append(c.want, c.out[:n]...)
		scramble(c.want[at:], c.told)
		c.out = c.out[n:]
		c.last = time.Now()
		c.mu.Lock()
		c.told += uint64(n)
		c.mu.Unlock()
	}
	c.out = nil
	return nil
}

func (c *client) hear(buf []byte) error {
	for len(c.want) > 0 {
		n, at, err := receive(c.fd, buf[:min(len(c.want), len(buf))])
		if errors.Is(err, unix.EAGAIN) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read, after byte %d: %w", c.heard, err)
		}
		for i, b := range buf[:n] {
			if b != c.want[i] {
				return fmt.Errorf("byte %d is wrong", c.heard+uint64(i))
			}
		}
		c.want = c.want[n:]
		c.last = time.Now()
		c.mu.Lock()
		c.heard += uint64(n)
		c.arrivals = append(c.arrivals, at)
		c.mu.Unlock()
		if n < len(buf) {
			return nil // the rest is read after its arrival
		}
	}
	return nil
}

// receive reads, and returns the kernel's receive time of the last byte. A reader's wait for a CPU is not a
// gap of the stream. The error is unix.EAGAIN without data, io.EOF at the end.
func receive(fd int, b []byte) (n int, at time.Time, err error) {
	var oob [64]byte
	n, oobn, _, _, err := unix.Recvmsg(fd, b, oob[:], unix.MSG_DONTWAIT)
	if err != nil {
		return 0, at, err
	}
	if n == 0 {
		return 0, at, io.EOF
	}
	at = time.Now() // the kernel sets no times until a moment after the first request
	all, err := unix.ParseSocketControlMessage(oob[:oobn])
	for _, m := range all {
		if m.Header.Level == unix.SOL_SOCKET && m.Header.Type == unix.SO_TIMESTAMPNS_NEW && len(m.Data) == 16 {
			at = time.Unix(int64(binary.NativeEndian.Uint64(m.Data)), int64(binary.NativeEndian.Uint64(m.Data[8:])))
		}
	}
	return n, at, err
}
