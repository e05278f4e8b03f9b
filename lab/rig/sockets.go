// SPDX-License-Identifier: Apache-2.0

package rig

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/pidfd"
	"github.com/weir-project/weir/internal/sockdiag"
	"github.com/weir-project/weir/lab/peers"
)

// SocketWatch reads the sockets on one port of a namespace from the kernel, from one thread inside the
// namespace. The lab detects a ready collector this way, independent of weir.
type SocketWatch struct {
	port uint16
	asks chan chan answer
	end  chan struct{}
	once sync.Once
}

// answer holds the protocol of every bound UDP socket and TCP listener on the port, by inode, and the bytes
// queued in the UDP sockets.
type answer struct {
	protos  map[uint32]uint8
	waiting uint64
	err     error
}

func WatchSockets(ns *netns.Handle, port uint16) *SocketWatch {
	w := &SocketWatch{port: port, asks: make(chan chan answer), end: make(chan struct{})}
	go func() {
		if err := ns.Do(func() error { w.serve(w.dump); return nil }); err != nil {
			w.serve(func() answer { return answer{err: err} })
		}
	}()
	return w
}

func (w *SocketWatch) serve(dump func() answer) {
	for {
		select {
		case ask := <-w.asks:
			ask <- dump()
		case <-w.end:
			return
		}
	}
}

func (w *SocketWatch) Stop() { w.once.Do(func() { close(w.end) }) }

func (w *SocketWatch) dump() answer {
	a := answer{protos: map[uint32]uint8{}}
	for _, q := range []sockdiag.Query{
		{Proto: unix.IPPROTO_TCP, States: 1 << unix.BPF_TCP_LISTEN, LocalPort: w.port},
		{Proto: unix.IPPROTO_UDP, LocalPort: w.port},
	} {
		sockets, err := sockdiag.Dump(q)
		if err != nil {
			return answer{err: err}
		}
		for _, s := range sockets {
			a.protos[s.Inode] = q.Proto
			if q.Proto == unix.IPPROTO_UDP {
				a.waiting += uint64(s.RecvQueue)
			}
		}
	}
	return a
}

// Appear waits until a collector's process holds its UDP socket and its TCP listener. It returns the last
// moment without one of them.
func (w *SocketWatch) Appear(ctx context.Context, c *peers.Collector, limit time.Duration) (time.Time, error) {
	p, err := pidfd.Open(c.PID())
	if err != nil {
		return time.Time{}, err
	}
	defer p.Close()
	var had []uint32
	var changed, dumped time.Time
	for begin, last := time.Now(), time.Now(); ; {
		now := time.Now()
		held, err := inodes(p)
		if !slices.Equal(held, had) {
			had, changed = held, now
		}
		ready := false
		// Listing the kernel's sockets costs far more than listing the process's. It is done only near a
		// change.
		if err == nil && (now.Sub(changed) < 200*time.Millisecond || now.Sub(dumped) > 50*time.Millisecond) {
			ready, err = w.ready(held)
			dumped = now
		}
		if err != nil {
			return now, fmt.Errorf("%s: %w; see its log in %s", c, err, c.Dir())
		}
		if ready {
			return last, nil
		}
		if last = now; now.Sub(begin) > limit {
			return now, fmt.Errorf("%s did not open its sockets within %s; see its log in %s", c, limit, c.Dir())
		}
		if err := pause(ctx, pollInterval); err != nil {
			return now, err
		}
	}
}

// inodes lists the sockets held by a process.
func inodes(p *pidfd.Process) ([]uint32, error) {
	held, err := p.Sockets()
	if err == nil && !p.Alive() {
		err = errors.New("it has ended")
	}
	return slices.Sorted(maps.Keys(held)), err
}

// ask returns the kernel's current answer.
func (w *SocketWatch) ask() answer {
	ask := make(chan answer, 1)
	select {
	case w.asks <- ask:
		return <-ask
	case <-w.end:
		return answer{err: context.Canceled}
	}
}

// Drained waits until all UDP sockets on the port are empty, and a little longer for the processes to
// finish their work.
func (w *SocketWatch) Drained(ctx context.Context, limit time.Duration) error {
	empty := 0
	for deadline := time.Now().Add(limit); empty < 5; {
		a := w.ask()
		if a.err != nil {
			return a.err
		}
		if empty++; a.waiting > 0 {
			empty = 0
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%d bytes of datagrams are unread after %s", a.waiting, limit)
		}
		if err := pause(ctx, 50*time.Millisecond); err != nil {
			return err
		}
	}
	return pause(ctx, 500*time.Millisecond)
}

// ready reports whether a UDP socket and a TCP listener on the port are among the inodes.
func (w *SocketWatch) ready(held []uint32) (bool, error) {
	a := w.ask()
	var tcp, udp bool
	for _, inode := range held {
		tcp = tcp || a.protos[inode] == unix.IPPROTO_TCP
		udp = udp || a.protos[inode] == unix.IPPROTO_UDP
	}
	return tcp && udp, a.err
}
