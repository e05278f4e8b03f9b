// SPDX-License-Identifier: Apache-2.0

package dplane

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"sync"
	"time"

	"github.com/weir-project/weir/feature"
)

// Engine runs sessions. Its methods are called one at a time, and should not wait: bfdd stands still while it asks for counters.
// They must not call Tell, which waits for them.
type Engine interface {
	// Add starts a session, or changes one that runs: the discriminator says which. What has become of it, Tell says.
	Add(Session) error
	// Delete ends a session.
	Delete(discriminator uint32)
	// Counters of a session.
	Counters(discriminator uint32) Counters
}

// Client is connected to a bfdd that listens (--dplaneaddr unix:PATH, or ipv4:ADDRESS:PORT), as often as it takes: bfdd tells
// a connection of all of its sessions at once, and those that do not fit into 8 KiB, 58 of them, are not told and not run by
// bfdd either. It does tell the next connection, of which there is always one to spare.
type Client struct {
	network, address string
	engine           Engine
	log              feature.Logger

	mu    sync.Mutex // of the engine, too
	owner map[uint32]*conn
	conns map[*conn]bool
}

type conn struct {
	net.Conn
	c        *Client
	version  byte
	sessions map[uint32]bool
	wmu      sync.Mutex
}

// Times of connections.
const (
	burst      = 100 * time.Millisecond // of silence, after which bfdd has told a connection all that it will
	renewal    = 2 * time.Second        // of the spare connection: it is told of what found no room meanwhile
	redial     = time.Second
	writeLimit = 5 * time.Second
)

// New makes a client; network is unix or tcp.
func New(network, address string, e Engine, log feature.Logger) *Client {
	return &Client{network: network, address: address, engine: e, log: log, owner: map[uint32]*conn{}, conns: map[*conn]bool{}}
}

// Run keeps connections until ctx is done. Sessions of a connection that bfdd closes are deleted: bfdd has them down until there is another data plane.
func (c *Client) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var readers sync.WaitGroup
	defer readers.Wait()
	defer cancel()
	context.AfterFunc(ctx, c.closeAll)
	connected := true // so that the first failure is told
	for {
		spare, err := c.dial(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			if connected {
				c.log.Warn("bfdd is not there", "address", c.address, "reason", err)
			}
			connected = false
			if !sleep(ctx, redial) {
				return nil
			}
			continue
		}
		if !connected {
			c.log.Info("connected to bfdd", "address", c.address)
		}
		connected = true
		told := make(chan struct{}, 1)
		ended := make(chan struct{})
		readers.Go(func() { spare.serve(told); close(ended) })
		if !c.mind(ctx, spare, told, ended) {
			return nil
		}
	}
}

// mind returns when another connection is wanted; false: ctx is done.
func (c *Client) mind(ctx context.Context, spare *conn, told, ended <-chan struct{}) bool {
	select {
	case <-told:
	case <-ended:
		return sleep(ctx, redial)
	case <-time.After(renewal):
		c.mu.Lock()
		idle := len(spare.sessions) == 0
		c.mu.Unlock()
		if idle {
			spare.Close()
		}
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
	for {
		select {
		case <-told:
		case <-ended:
			return sleep(ctx, redial)
		case <-time.After(burst):
			return true
		case <-ctx.Done():
			return false
		}
	}
}

func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

func (c *Client) dial(ctx context.Context) (*conn, error) {
	var d net.Dialer
	n, err := d.DialContext(ctx, c.network, c.address)
	if err != nil {
		return nil, err
	}
	out := &conn{Conn: n, c: c, sessions: map[uint32]bool{}}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.conns[out] = true
	if ctx.Err() != nil {
		n.Close()
	}
	return out, nil
}

func (c *Client) closeAll() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for n := range c.conns {
		n.Close()
	}
}

// serve reads until the connection ends. told gets a word with each session.
func (n *conn) serve(told chan<- struct{}) {
	r := bufio.NewReader(n)
	var err error
	for err == nil {
		var m message
		if m, err = read(r); err == nil {
			err = n.handle(m, told)
		}
	}
	n.Close()
	n.c.mu.Lock()
	defer n.c.mu.Unlock()
	delete(n.c.conns, n)
	switch {
	case errors.Is(err, net.ErrClosed): // by us
	case len(n.sessions) > 0:
		n.c.log.Warn("bfdd has closed the connection: its sessions are down", "sessions", len(n.sessions), "reason", err)
	case !errors.Is(err, io.EOF):
		n.c.log.Warn("bfdd", "reason", err)
	}
	for d := range n.sessions {
		delete(n.c.owner, d)
		n.c.engine.Delete(d)
	}
}

func (n *conn) handle(m message, told chan<- struct{}) error {
	c := n.c
	c.mu.Lock()
	defer c.mu.Unlock()
	n.version = m.version
	switch m.kind {
	case addSession, deleteSession:
		s, err := parseSession(m.body)
		if err != nil {
			return err
		}
		d := s.Config.Discriminator
		if m.kind == deleteSession {
			delete(n.sessions, d)
			if c.owner[d] == n {
				delete(c.owner, d)
				c.engine.Delete(d)
			}
			return nil
		}
		if before := c.owner[d]; before != nil && before != n {
			delete(before.sessions, d)
		}
		n.sessions[d], c.owner[d] = true, n
		if err := c.engine.Add(s); err != nil {
			c.log.Warn("a session of bfdd's cannot run", "peer", s.Peer, "interface", s.Device, "reason", err)
		}
		select {
		case told <- struct{}{}:
		default:
		}
	case requestCounters:
		if len(m.body) < 4 {
			return ErrProtocol
		}
		d := binary.BigEndian.Uint32(m.body)
		return n.send(sessionCounters, m.id, c.engine.Counters(d).append(nil, d))
	case echoRequest:
		return n.send(echoReply, m.id, m.body)
	}
	return nil
}

func (n *conn) send(kind, id uint16, body []byte) error {
	n.wmu.Lock()
	defer n.wmu.Unlock()
	if err := n.SetWriteDeadline(time.Now().Add(writeLimit)); err != nil {
		return err
	}
	_, err := n.Write(appendMessage(nil, n.version, kind, id, body))
	return err
}

// Tell has bfdd know what a session has become. A session that bfdd has deleted is not told of.
func (c *Client) Tell(change Change) {
	c.mu.Lock()
	n := c.owner[change.Discriminator]
	c.mu.Unlock()
	if n == nil {
		return
	}
	if err := n.send(stateChange, 0, change.append(nil)); err != nil {
		n.Close() // it begins anew
	}
}
