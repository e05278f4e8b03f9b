// SPDX-License-Identifier: Apache-2.0

package handoffcompare

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// pings holds the results of requests.
type pings struct {
	asked, wrong int
	answered     map[int]int // by server
	took         []time.Duration
}

// open opens the connections of a kind.
func (w *world) open(v way, kind byte) (fds []int, err error) {
	defer func() {
		if err != nil {
			closeAll(fds)
		}
	}()
	for i := range connections {
		fd, err := w.dial(v.to(i))
		if err != nil {
			return fds, fmt.Errorf("connect to %s: %w", v.to(i), err)
		}
		fds = append(fds, fd)
		if err := writeAll(fd, []byte{kind}); err != nil {
			return fds, err
		}
	}
	return fds, nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}

// warm is the number of uncounted requests before the others.
const warm = 20 * connections

// ping sends one request at a time, on each connection in turn.
func (w *world) ping(v way, d time.Duration) (*pings, error) {
	fds, err := w.open(v, kindPing)
	if err != nil {
		return nil, err
	}
	defer closeAll(fds)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	p := &pings{answered: map[int]int{}, took: make([]time.Duration, 0, 1<<16)}
	ask, got := make([]byte, message), make([]byte, message)
	random := rand.New(rand.NewPCG(w.env.Seed, 1))
	var end time.Time
	for i := 0; ; i++ {
		if i == warm {
			end = time.Now().Add(d)
		}
		for at := 0; at < len(ask); at += 8 {
			binary.BigEndian.PutUint64(ask[at:], random.Uint64())
		}
		fd := fds[i%len(fds)]
		begin := time.Now()
		if err := writeAll(fd, ask); err != nil {
			return nil, fmt.Errorf("send a request: %w", err)
		}
		if err := readAll(fd, got); err != nil {
			return nil, fmt.Errorf("wait for an answer: %w", err)
		}
		done := time.Now()
		p.asked++
		p.answered[int(got[0])]++
		if !bytes.Equal(ask[1:], got[1:]) {
			p.wrong++
		}
		if i >= warm {
			p.took = append(p.took, done.Sub(begin))
			if done.After(end) {
				return p, nil
			}
		}
	}
}

// bulk holds the result of a bulk transfer.
type bulk struct {
	sent, received uint64
	took           time.Duration // until the last byte arrived
}

func (b bulk) gbits() float64 { return float64(b.received) * 8 / b.took.Seconds() / 1e9 }

// bulk sends for a while over all connections at once.
func (w *world) bulk(v way, kind byte, d time.Duration) (total bulk, err error) {
	fds, err := w.open(v, kind)
	if err != nil {
		return total, err
	}
	defer closeAll(fds)
	each := make([]bulk, len(fds))
	errs := make([]error, len(fds))
	begin := time.Now()
	var wg sync.WaitGroup
	for i, fd := range fds {
		wg.Go(func() {
			if kind == kindUp {
				each[i], errs[i] = upload(fd, d)
			} else {
				each[i], errs[i] = download(fd, d)
			}
		})
	}
	wg.Wait()
	total.took = time.Since(begin)
	for _, b := range each {
		total.sent += b.sent
		total.received += b.received
	}
	return total, errors.Join(errs...)
}

func upload(fd int, d time.Duration) (b bulk, err error) {
	b.sent = pour(fd, d)
	if err := unix.Shutdown(fd, unix.SHUT_WR); err != nil {
		return b, err
	}
	count := make([]byte, 8)
	if err := readAll(fd, count); err != nil {
		return b, fmt.Errorf("wait for the server's count: %w", err)
	}
	b.received = binary.BigEndian.Uint64(count)
	return b, nil
}

func download(fd int, d time.Duration) (b bulk, err error) {
	if err := writeAll(fd, binary.BigEndian.AppendUint32(nil, uint32(d.Milliseconds()))); err != nil {
		return b, err
	}
	tail := make([]byte, 0, 16)
	buf := make([]byte, block)
	for {
		n, err := unix.Read(fd, buf)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return b, err
		case n == 0:
			if len(tail) < 8 {
				return b, errEnded
			}
			b.sent = binary.BigEndian.Uint64(tail)
			b.received -= 8
			return b, nil
		}
		b.received += uint64(n)
		tail = append(tail, buf[max(0, n-8):n]...)
		tail = append(tail[:0], tail[max(0, len(tail)-8):]...)
	}
}
