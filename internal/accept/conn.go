// SPDX-License-Identifier: Apache-2.0

package accept

import (
	"container/heap"
	"net"
	"sync"
	"time"
)

// Conn is an accepted connection. Close ends it, and its count.
type Conn struct {
	net.Conn
	Peer Peer

	l     *Listener
	close sync.Once

	// l.mu guards the rest.
	state    state
	since    uint64 // serial of its last change of state
	at       time.Time
	index    int // in its peer's heap; -1: in none
	counted  bool
	deadline *time.Timer
}

type state uint8

const (
	waiting  state = iota // says nothing, or is being introduced: may be closed to let another in
	busy                  // has a request that is being answered
	admitted              // has shown who it is
)

// peerConns are a peer's connections.
type peerConns struct {
	all     int
	idle    ages // waiting
	working ages // busy
}

// enter counts a connection, making room for it; nil if there is none.
func (l *Listener) enter(raw net.Conn, p Peer) *Conn {
	c := &Conn{Conn: raw, Peer: p, l: l, index: -1}
	if p.trusted() {
		c.state = admitted
		return c
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	own := l.peers[p]
	if own == nil {
		own = &peerConns{}
	}
	if own.all >= l.o.PerPeer && !l.evict(own) {
		l.o.Log.Warn("connection refused: its peer has too many", "listener", l.o.Name, "peer", p, "limit", l.o.PerPeer)
		return nil
	}
	if l.count >= l.o.Strangers {
		most := l.heaviest()
		if most != nil && most.strangers() <= own.strangers() {
			most = own
		}
		if most == nil || !l.evict(most) {
			l.o.Log.Warn("connection refused: there are too many", "listener", l.o.Name, "peer", p, "limit", l.o.Strangers)
			return nil
		}
	}
	l.peers[p] = own
	own.all++
	l.count++
	c.counted = true
	c.to(own, waiting)
	c.deadline = time.AfterFunc(l.o.Handshake, c.late)
	return c
}

// heaviest is the peer with the most connections that are not admitted.
func (l *Listener) heaviest() (most *peerConns) {
	for _, p := range l.peers {
		if n := p.strangers(); n > 0 && (most == nil || n > most.strangers() || n == most.strangers() && p.oldest() < most.oldest()) {
			most = p
		}
	}
	return most
}

// strangers counts the connections that are not admitted.
func (p *peerConns) strangers() int { return len(p.idle) + len(p.working) }

// oldest is the serial of the connection that evict would close.
func (p *peerConns) oldest() uint64 {
	switch {
	case len(p.idle) > 0:
		return p.idle[0].since
	case len(p.working) > 0:
		return p.working[0].since
	}
	return 0
}

// evict closes the peer's connection that has been idle for longest, else the one that
// has been busy for too long. l.mu is held.
func (l *Listener) evict(p *peerConns) bool {
	var c *Conn
	switch {
	case len(p.idle) > 0:
		c = p.idle[0]
	case len(p.working) > 0 && l.o.Write > 0 && time.Since(p.working[0].at) > l.o.Write/10:
		c = p.working[0]
	default:
		return false
	}
	l.uncount(c)
	l.o.Log.Warn("idle connection closed to let another in", "listener", l.o.Name, "peer", c.Peer)
	go c.Conn.Close()
	return true
}

// evictOldest frees a descriptor.
func (l *Listener) evictOldest() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	p := l.heaviest()
	return p != nil && l.evict(p)
}

// to moves a connection to a state. l.mu is held.
func (c *Conn) to(p *peerConns, s state) {
	if c.index >= 0 {
		heap.Remove(p.of(c.state), c.index)
	}
	c.l.serial++
	c.state, c.since, c.at = s, c.l.serial, time.Now()
	if s != admitted {
		heap.Push(p.of(s), c)
	}
}

func (p *peerConns) of(s state) *ages {
	if s == busy {
		return &p.working
	}
	return &p.idle
}

// uncount ends the counting of a connection. l.mu is held.
func (l *Listener) uncount(c *Conn) {
	if c.deadline != nil {
		c.deadline.Stop()
	}
	if !c.counted {
		return
	}
	c.counted = false
	p := l.peers[c.Peer]
	if c.index >= 0 {
		heap.Remove(p.of(c.state), c.index)
	}
	if c.state != admitted {
		l.count--
	}
	if p.all--; p.all == 0 {
		delete(l.peers, c.Peer)
	}
}

// late closes a connection that is not admitted in time.
func (c *Conn) late() {
	c.l.mu.Lock()
	if c.state != waiting {
		c.l.mu.Unlock()
		return
	}
	c.l.uncount(c)
	c.l.mu.Unlock()
	c.Close()
}

// Admit takes a connection out of the bounds of strangers: it has shown who it is. It
// reports false if the connection was closed already.
func (c *Conn) Admit() bool {
	l := c.l
	l.mu.Lock()
	defer l.mu.Unlock()
	if c.state == admitted {
		return true // trusted
	}
	if !c.counted {
		return false
	}
	c.deadline.Stop()
	p := l.peers[c.Peer]
	c.to(p, admitted)
	l.count--
	if c.Peer.kind == unixUser {
		return true
	}
	c.counted = false // its name bounds its connections, and not its address
	if p.all--; p.all == 0 {
		delete(l.peers, c.Peer)
	}
	return true
}

// working says that the connection has a request, or waits for the next one.
func (c *Conn) working(s state) {
	l := c.l
	l.mu.Lock()
	defer l.mu.Unlock()
	if !c.counted || c.state == admitted {
		return
	}
	c.deadline.Stop() // net/http has its own from here on
	c.to(l.peers[c.Peer], s)
}

// Close implements net.Conn.
func (c *Conn) Close() error {
	c.close.Do(func() {
		c.l.mu.Lock()
		defer c.l.mu.Unlock()
		c.l.uncount(c)
	})
	return c.Conn.Close()
}

// ages are connections, the first being the oldest in its state.
type ages []*Conn

func (a ages) Len() int           { return len(a) }
func (a ages) Less(i, j int) bool { return a[i].since < a[j].since }
func (a ages) Swap(i, j int) {
	a[i], a[j] = a[j], a[i]
	a[i].index, a[j].index = i, j
}

// Push implements heap.Interface.
func (a *ages) Push(x any) {
	c := x.(*Conn)
	c.index = len(*a)
	*a = append(*a, c)
}

// Pop implements heap.Interface.
func (a *ages) Pop() any {
	old := *a
	c := old[len(old)-1]
	old[len(old)-1] = nil
	c.index = -1
	*a = old[:len(old)-1]
	return c
}
