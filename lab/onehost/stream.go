// SPDX-License-Identifier: Apache-2.0

package onehost

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/topo"
)

// StreamResult is the result of streams with repeated kills of their server.
type StreamResult struct {
	Kills    int // of the server, by SIGKILL
	Survived int // kills with all streams continued: the same connection, every byte right
	Bytes    uint64
	Resets   int // connections ended early
	Wrong    int // wrong answers

	// Silence of clients around a kill, and the part for the start of the next process.
	StallP50, StallP99, StallMax time.Duration
	StartP50, StartP99           time.Duration
	Calm                         time.Duration // the longest silence in as many periods without kills, as the machine's own share

	Notes []string
}

// streams is the number of parallel streams.
const streams = 2

// listenAt is the address of the streams' servers.
const listenAt = "127.0.0.1:7000"

// Stream runs streams of questions and answers in both directions, verifies each byte, and kills their
// server kills times at random moments. Each time the next process continues the connections.
func Stream(ctx context.Context, e *lab.Env, kills int) (*StreamResult, error) {
	r := &StreamResult{}
	ns, name, err := e.Namespace("streams")
	if err != nil {
		return nil, err
	}
	if err := topo.Addresses(ns); err != nil {
		return nil, err
	}
	h, err := newHost(ctx, e, name, "streams")
	if err != nil {
		return nil, err
	}
	m, err := h.start("stream", "0", h.socket, h.service, "0", listenAt)
	if err == nil {
		err = h.await(ctx, m)
	}
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var all []*client
	for i := range streams {
		c := &client{seed: e.Seed + uint64(i)}
		if err := ns.Do(func() (err error) { c.conn, err = net.Dial("tcp", listenAt); return err }); err != nil {
			return nil, err
		}
		e.OnClose(func() { c.conn.Close() })
		all = append(all, c)
	}
	var running sync.WaitGroup
	for _, c := range all {
		running.Go(c.ask)
		running.Go(c.check)
	}
	err = h.killAgain(ctx, m, all, kills, r)
	for _, c := range all {
		c.end()
	}
	running.Wait()
	for i, c := range all {
		r.Bytes += c.answered.Load() * (questionSize + answerSize)
		switch err := c.err; {
		case err == nil:
		case errors.Is(err, errWrong):
			r.Wrong++
			r.Notes = append(r.Notes, fmt.Sprintf("stream %d: %v", i, err))
		default:
			r.Resets++
			r.Notes = append(r.Notes, fmt.Sprintf("stream %d: %v", i, err))
		}
	}
	return r, err
}

// killAgain kills the server, starts the next, and records the effect on clients.
func (h *host) killAgain(ctx context.Context, m *member, all []*client, kills int, r *StreamResult) error {
	if err := h.goesOn(ctx, all); err != nil {
		return err
	}
	var stalls, starts []time.Duration
	for range kills {
		// First undisturbed, for about as long as the next part.
		reset(all)
		if err := pause(ctx, 10*time.Millisecond+time.Duration(h.env.Rand.IntN(20_000))*time.Microsecond); err != nil {
			return err
		}
		r.Calm = max(r.Calm, longest(all))
		reset(all)
		if err := m.kill(); err != nil {
			return err
		}
		r.Kills++
		begin := time.Now()
		var err error
		if m, err = h.start("stream", "0", h.socket, h.service, "0", listenAt); err == nil {
			err = h.await(ctx, m)
		}
		if err != nil {
			return err
		}
		starts = append(starts, time.Since(begin))
		if err := h.goesOn(ctx, all); err != nil {
			r.Notes = append(r.Notes, err.Error())
			break // ended streams cannot continue
		}
		stalls = append(stalls, longest(all))
		r.Survived++
	}
	r.StallP50, r.StallP99, r.StallMax = lab.Percentiles(stalls)
	r.StartP50, r.StartP99, _ = lab.Percentiles(starts)
	return ctx.Err()
}

// goesOn waits until every client has right answers to new questions.
func (h *host) goesOn(ctx context.Context, all []*client) error {
	for _, c := range all {
		now := c.asked.Load()
		if err := h.until(ctx, "the stream goes on", func() (bool, error) {
			if c.over.Load() {
				return false, errors.New("a stream has ended")
			}
			return c.answered.Load() > now, nil
		}); err != nil {
			return err
		}
	}
	return nil
}

// client is one end of a stream.
type client struct {
	seed            uint64
	conn            net.Conn
	asked, answered atomic.Uint64 // questions
	stop, over      atomic.Bool
	err             error // valid after waiting

	last    atomic.Int64 // time of the last received byte, in ns of the clock
	silence atomic.Int64 // the longest time between two bytes since reset, in ns
}

func (c *client) questions() questions { return questions{rand.NewPCG(c.seed, 1)} }

// ask sends questions in pieces of any size, until end.
func (c *client) ask() {
	q := c.questions()
	sizes := rand.New(rand.NewPCG(c.seed, 2))
	var unsent []byte
	for !c.stop.Load() {
		for len(unsent) < 1400 {
			x := q.next()
			unsent = append(unsent, x[:]...)
			c.asked.Add(1)
		}
		n := 1 + sizes.IntN(len(unsent))
		if _, err := c.conn.Write(unsent[:n]); err != nil {
			return // its reader reports the reason
		}
		unsent = unsent[n:]
		time.Sleep(200 * time.Microsecond)
	}
	if _, err := c.conn.Write(unsent); err == nil {
		_ = c.conn.(*net.TCPConn).CloseWrite()
	}
}

// errWrong reports lost, doubled or changed bytes.
var errWrong = errors.New("wrong")

// check reads answers to the end of the stream, expected right after the last.
func (c *client) check() {
	defer c.over.Store(true)
	q, k := c.questions(), restoreTalk(nil)
	b := make([]byte, answerSize)
	for n := uint64(0); ; n++ {
		if err := c.conn.SetReadDeadline(time.Now().Add(patience)); err != nil {
			c.err = err
			return
		}
		_, err := io.ReadFull(c.conn, b)
		c.heard()
		if err == io.EOF && c.stop.Load() && n == c.asked.Load() {
			return
		}
		if err != nil {
			c.err = fmt.Errorf("after %d of %d answers: %w", n, c.asked.Load(), err)
			return
		}
		x := q.next()
		k.next(x[:])
		if got := binary.LittleEndian.Uint64(b); got != k.hash {
			c.err = fmt.Errorf("%w: answer %d is %x, want %x", errWrong, n, got, k.hash)
			return
		}
		c.answered.Add(1)
	}
}

// heard records received bytes.
func (c *client) heard() {
	now := time.Now().UnixNano()
	if last := c.last.Swap(now); last != 0 && now-last > c.silence.Load() {
		c.silence.Store(now - last)
	}
}

// end stops the client's questions. After all answers its stream ends.
func (c *client) end() { c.stop.Store(true) }

func reset(all []*client) {
	for _, c := range all {
		c.silence.Store(0)
	}
}

// longest returns the longest silence since reset, including a current one.
func longest(all []*client) (d time.Duration) {
	for _, c := range all {
		d = max(d, time.Duration(c.silence.Load()), time.Duration(time.Now().UnixNano()-c.last.Load()))
	}
	return d
}
