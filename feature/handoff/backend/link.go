// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
)

// link is the connection to another agent. It reconnects after failures.
type link struct {
	a       *Agent
	to      Remote
	names   []string // in place of to's name: all agents reachable at the address
	hear    func(*peer.Conn, peer.Frame)
	load    func(from Remote, service uint16, n uint32, none bool)
	hello   func() peer.Hello
	stop    func()
	changed func(*link) // the connection was made, or lost
	c       atomic.Pointer[peer.Conn]
	sent    atomic.Uint64 // sessions sent by drain
	none    sync.Map      // by service: the backend reports no member
}

var (
	errNoLink = errors.New("not connected")
	errEnds   = errors.New("it closes each connection at once: see its log")
)

func (k *link) conn() *peer.Conn { return k.c.Load() }

const (
	linkFirst = 20 * time.Millisecond // delay between attempts
	linkLast  = time.Second
)

func (k *link) run(ctx context.Context) {
	warned := false
	for pause := linkFirst; ctx.Err() == nil; pause = min(2*pause, linkLast) {
		c, err := k.dial(ctx)
		if err == nil {
			begun := time.Now()
			k.serve(ctx, c)
			if err = errEnds; time.Since(begun) >= linkLast {
				err, pause, warned = nil, linkFirst, false
			}
		}
		if err != nil && pause == linkLast && !warned {
			warned = true
			k.a.o.Log.Warn("cannot connect to an agent", "name", k.to.Name, "address", k.to.Address, "err", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}

// dial connects. An address shared by load balancers may lead to any of them, so the certificate shows the name.
func (k *link) dial(ctx context.Context) (c *peer.Conn, err error) {
	names := k.names
	if len(names) == 0 {
		names = []string{k.to.Name}
	}
	c, err = peer.DialAny(ctx, k.to.Address, names, k.a.o.TLS, k.hello())
	if err == nil && c.Peer.Number != k.to.Number {
		err = fmt.Errorf("it has number %d, want %d", c.Peer.Number, k.to.Number)
		c.Close()
	}
	return c, err
}

func (k *link) serve(ctx context.Context, c *peer.Conn) {
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	k.c.Store(c)
	k.changed(k)
	ended := make(chan struct{})
	go k.probe(c, ended)
	k.a.workers.hear(c, func(f peer.Frame) {
		switch {
		case !f.IsLoad:
			k.hear(c, f)
		case k.load != nil:
			k.load(k.to, peer.ServiceNumber(f.Flow.Service), f.Load, f.None)
		}
	})
	close(ended)
	k.c.Store(nil)
	c.Close()
	k.changed(k)
}

const (
	probeEvery = time.Second
	maxMissed  = 3 // unanswered probes in a row
)

// probe ends the connection to an agent that does not answer. A stopped agent accepts data while its buffers have
// room, and its sessions would wait unnoticed.
func (k *link) probe(c *peer.Conn, ended <-chan struct{}) {
	t := time.NewTicker(probeEvery)
	defer t.Stop()
	for {
		select {
		case <-ended:
			return
		case <-t.C:
		}
		if c.Unanswered() >= maxMissed {
			k.a.o.Log.Warn("agent does not answer, disconnecting", "name", k.to.Name, "address", k.to.Address)
			c.Close()
			return
		}
		_ = c.Ping() // a failed connection closes itself
	}
}

// sendTo sends a frame to another backend's agent.
func (a *Agent) sendTo(h move.Backend, f peer.Frame) error {
	k := a.known.Load().links[h]
	if k == nil {
		return errNoLink
	}
	return k.send(f)
}

// send sends a frame on the current connection.
func (k *link) send(f peer.Frame) error {
	c := k.conn()
	if c == nil {
		return errNoLink
	}
	f.Instance = c.Peer.Instance
	return c.Send(f)
}
