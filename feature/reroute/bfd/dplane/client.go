// SPDX-License-Identifier: Apache-2.0

package dplane

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/accept"
	"github.com/weir-project/weir/internal/users"
)

// Engine runs sessions. Calls are serialized. They should not block, because bfdd waits while it asks for counters.
// They must not call Tell, which waits for them.
type Engine interface {
	// Add starts a session, or changes the running one with the same discriminator. Tell reports its state later.
	// Equal calls may repeat.
	Add(Session, Owner) error
	// Delete ends a session.
	Delete(discriminator uint32)
	// Lost ends a session after the end of its connection. bfdd may hand it over again.
	Lost(discriminator uint32)
	// Counters returns the counters of a session.
	Counters(discriminator uint32) Counters
}

// Owner identifies the connection of a session, for a later Adopt.
type Owner struct {
	Connection uint64 // cookie of its socket (SO_COOKIE, socket(7))
	Version    byte   // of the protocol on the connection
}

// Keep holds connections with sessions for a client in a later process. bfdd does not notice the change.
type Keep interface {
	Put(connection uint64, fd int) error
	Remove(connection uint64)
}

// Client connects to a listening bfdd (--dplaneaddr unix:PATH, or ipv4:ADDRESS:PORT). bfdd sends all of its sessions
// to a new connection at once. Sessions beyond 8 KiB, 58 of them, are neither sent nor run by bfdd. It sends them to
// the next connection, so the client always keeps a spare one.
type Client struct {
	network, address string
	engine           Engine
	log              feature.Logger
	keep             Keep // nil: connections are not kept
	adopted          []*conn

	mu    sync.Mutex // also serializes the engine; locked before conn.wmu
	owner map[uint32]*conn
	conns map[*conn]bool
	kept  []uint64 // cookies of kept connections, after Run
}

type conn struct {
	net.Conn
	incoming
	c        *Client
	cookie   uint64
	version  byte
	kept     bool
	sessions map[uint32]bool
	wmu      sync.Mutex
}

// Times of connections.
const (
	burst      = 100 * time.Millisecond // silence after which bfdd has sent all it will
	renewal    = 2 * time.Second        // of the spare connection, to receive sessions without room before
	redial     = time.Second
	writeLimit = 5 * time.Second
)

// New returns a client. network is unix or tcp. Without keep, connections end with the client.
func New(network, address string, e Engine, keep Keep, log feature.Logger) *Client {
	return &Client{network: network, address: address, engine: e, keep: keep, log: log, owner: map[uint32]*conn{}, conns: map[*conn]bool{}}
}

// Adopt takes over the connections kept by an earlier client, with their sessions. owners holds the owners passed to
// Engine.Add. Sessions of missing connections are deleted. Call it before Run. It closes the files.
func (c *Client) Adopt(files []*os.File, owners map[uint32]Owner) {
	byCookie := map[uint64]*conn{}
	for _, f := range files {
		socket, err := net.FileConn(f)
		f.Close()
		var n *conn
		if err == nil {
			n, err = c.newConn(socket)
		}
		if err != nil {
			c.log.Warn("kept connection to bfdd is unusable", "err", err)
			continue
		}
		n.kept = true
		byCookie[n.cookie] = n
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for d, o := range owners {
		n := byCookie[o.Connection]
		if n == nil {
			c.engine.Lost(d)
			continue
		}
		n.version, n.sessions[d], c.owner[d] = o.Version, true, n
	}
	for _, n := range byCookie {
		c.conns[n] = true
		c.adopted = append(c.adopted, n)
	}
}

// Run keeps connections until ctx is done. If bfdd closes a connection, its sessions are deleted and bfdd has them
// down until the next data plane. At the end, sessions of connections not kept are deleted.
func (c *Client) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var readers sync.WaitGroup
	defer readers.Wait()
	defer cancel()
	context.AfterFunc(ctx, c.closeAll)
	for _, n := range c.adopted {
		readers.Go(func() { n.serve(ctx, make(chan struct{}, 1)) })
	}
	connected, tried := false, false // for logging the first success and the first failure
	for ; ; tried = true {
		spare, err := c.dial(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			if connected || !tried {
				c.log.Warn("cannot connect to bfdd", "address", c.address, "err", err)
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
		readers.Go(func() { spare.serve(ctx, told); close(ended) })
		if !c.mind(ctx, spare, told, ended) {
			return nil
		}
	}
}

// Abandon gives up kept connections after Run. bfdd then has their sessions down.
func (c *Client) Abandon() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, cookie := range c.kept {
		c.keep.Remove(cookie)
	}
	c.kept = nil
}

// mind returns true when another connection is needed, or false when ctx is done.
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
		return nil, users.Lacking(err, unix.CAP_DAC_OVERRIDE) // the socket's directory is of FRR's user
	}
	if err := c.check(ctx, n); err != nil {
		n.Close()
		return nil, err
	}
	out, err := c.newConn(n)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.conns[out] = true
	if ctx.Err() != nil {
		n.Close()
	}
	return out, nil
}

// frrUser is bfdd's user unless FRR was built for another one.
const frrUser = "frr"

// check verifies the server's user, because anybody can use bfdd's address before its start and during a restart.
func (c *Client) check(ctx context.Context, n net.Conn) error {
	if tcp, ok := n.(*net.TCPConn); ok {
		return accept.CheckTCPServer(ctx, tcp, frrUser)
	}
	return accept.CheckServer(n, c.address, "", frrUser)
}

// newConn closes the socket on an error.
func (c *Client) newConn(socket net.Conn) (*conn, error) {
	n := &conn{Conn: socket, c: c, sessions: map[uint32]bool{}}
	err := n.incoming.of(socket)
	if err == nil {
		err = n.control(func(fd int) (err error) {
			n.cookie, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
			return err
		})
	}
	if err != nil {
		socket.Close()
		return nil, err
	}
	return n, nil
}

func (c *Client) closeAll() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for n := range c.conns {
		n.Close()
	}
}

// serve reads until the connection ends, and signals told with each session. It consumes a message only after
// handling it, so a later process never starts within a message.
func (n *conn) serve(ctx context.Context, told chan<- struct{}) {
	var err error
	for err == nil {
		var m message
		var length int
		if m, length, err = n.next(); err == nil {
			if m.kind == addSession {
				n.keepOpen()
			}
			if err = n.handle(m, told); err == nil {
				err = n.consume(length)
			}
		}
	}
	n.Close()
	n.c.mu.Lock()
	defer n.c.mu.Unlock()
	delete(n.c.conns, n)
	switch {
	case ctx.Err() != nil && n.kept:
		n.c.kept = append(n.c.kept, n.cookie)
		return
	case errors.Is(err, net.ErrClosed): // closed by this client
	case len(n.sessions) > 0:
		n.c.log.Warn("bfdd closed the connection, its sessions are down", "sessions", len(n.sessions), "err", err)
	case !errors.Is(err, io.EOF):
		n.c.log.Warn("connection to bfdd failed", "err", err)
	}
	if n.kept {
		n.c.keep.Remove(n.cookie)
	}
	for d := range n.sessions {
		delete(n.c.owner, d)
		n.c.engine.Lost(d)
	}
}

// keepOpen stores the connection from its first session on.
func (n *conn) keepOpen() {
	if n.kept || n.c.keep == nil {
		return
	}
	if err := n.control(func(fd int) error { return n.c.keep.Put(n.cookie, fd) }); err != nil {
		n.c.log.Warn("sessions of bfdd will go down when weir serve restarts", "err", err)
		return
	}
	n.kept = true
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
		if err := c.engine.Add(s, Owner{n.cookie, n.version}); err != nil {
			c.log.Warn("session of bfdd rejected", "peer", s.Peer, "interface", s.Device, "err", err)
		}
		select {
		case told <- struct{}{}:
		default:
		}
	case requestCounters:
		if len(m.body) < 4 {
			return errProtocol
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

// Tell sends the state of a session to bfdd. It skips sessions deleted by bfdd.
func (c *Client) Tell(change Change) {
	c.mu.Lock()
	n := c.owner[change.Discriminator]
	c.mu.Unlock()
	if n == nil {
		return
	}
	if err := n.send(stateChange, 0, change.append(nil)); err != nil {
		n.Close() // Run connects again
	}
}
