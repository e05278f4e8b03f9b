// SPDX-License-Identifier: Apache-2.0

package accept

import (
	"container/heap"
	"fmt"
	"net"
	"sync"
	"time"
)

// Conn is an accepted connection. It counts for its peer until it is closed and unused. A peer can
// block its readers, and a blocked read occupies a thread and a descriptor.
type Conn struct {
	net.Conn
	Peer Peer

	l     *Listener
	close sync.Once
	left  chan struct{} // closed when the connection no longer counts

	// l.mu guards the other fields.
	uses     int  // users of the socket: one until Close returns; with Options.Held another one until Release
	ending   bool // closed, or being closed
	state    state
	since    uint64 // serial of the last state change
	at       time.Time
	index    int // in its peer's heap; -1: in none
	counted  bool
	deadline *time.Timer
}

type state uint8

const (
	waiting  state = iota // silent or in its handshake: may be closed for a newcomer
	busy                  // has a request in progress
	admitted              // identified
)

// peerConns are the connections of one peer.
type peerConns struct {
	all     int  // including ending ones
	idle    ages // waiting
	working ages // busy
}

// A newcomer waits for the end of the connection closed for it. All other newcomers wait meanwhile,
// and a peer can delay the end. So these waits share a time budget over all peers. Without budget
// the newcomer is refused.
const (
	longestEnd = 200 * time.Millisecond
	endBurst   = time.Second
	endShare   = 5 // a fifth of the time
)

// enter counts a connection and makes room for it. It returns nil if there is none.
func (l *Listener) enter(raw net.Conn, p Peer) *Conn {
	c := &Conn{Conn: raw, Peer: p, l: l, index: -1, uses: 1, left: make(chan struct{})}
	if l.o.Held {
		c.uses++
	}
	if p.trusted() {
		c.state = admitted
		return c
	}
	for {
		evicted, full := l.claim(c)
		switch {
		case full == "":
			return c
		case evicted == nil || !l.wait(evicted):
			l.o.Log.Warn("connection refused: "+full, "listener", l.o.Name, "peer", p)
			return nil
		}
	}
}

// claim counts a connection if there is room. Otherwise it names the full limit, and evicts another
// connection if that helps.
func (l *Listener) claim(c *Conn) (evicted *Conn, full string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	own := l.peers[c.Peer]
	if own == nil {
		own = &peerConns{}
	}
	if own.all >= l.o.PerPeer {
		return l.evict(own), fmt.Sprintf("its peer is at the limit of %d", own.all)
	}
	if l.count >= l.o.Strangers {
		most := l.heaviest()
		if most != nil && most.strangers() <= own.strangers() {
			most = own
		}
		full = fmt.Sprintf("the listener is at the limit of %d", l.count)
		if most == nil {
			return nil, full
		}
		return l.evict(most), full
	}
	l.peers[c.Peer] = own
	own.all++
	l.count++
	c.counted = true
	c.to(own, waiting)
	c.deadline = time.AfterFunc(l.o.Handshake, c.late)
	return nil, ""
}

// wait waits until an evicted connection no longer counts. It reports whether that happened in
// time.
func (l *Listener) wait(c *Conn) bool {
	began := time.Now()
	l.spent = l.spentAt(began)
	longest := min(longestEnd, endBurst-l.spent)
	gone := true
	select {
	case <-c.left:
	case <-time.After(longest):
		gone = false
	}
	l.ended = time.Now()
	l.spent += l.ended.Sub(began)
	return gone
}

// spentAt returns the spent part of the budget for waits.
func (l *Listener) spentAt(now time.Time) time.Duration {
	return max(0, l.spent-now.Sub(l.ended)/endShare)
}

// heaviest returns the peer with the most connections not admitted.
func (l *Listener) heaviest() (most *peerConns) {
	for _, p := range l.peers {
		if n := p.strangers(); n > 0 && (most == nil || n > most.strangers() || n == most.strangers() && p.oldest() < most.oldest()) {
			most = p
		}
	}
	return most
}

// strangers returns the number of connections not admitted.
func (p *peerConns) strangers() int { return len(p.idle) + len(p.working) }

// oldest returns the serial of the next connection to evict.
func (p *peerConns) oldest() uint64 {
	switch {
	case len(p.idle) > 0:
		return p.idle[0].since
	case len(p.working) > 0:
		return p.working[0].since
	}
	return 0
}

// evict closes the peer's longest idle connection, else the longest busy one if that exceeds a
// tenth of Options.Write. It returns nil if there is none. l.mu is held.
func (l *Listener) evict(p *peerConns) *Conn {
	var c *Conn
	switch {
	case len(p.idle) > 0:
		c = p.idle[0]
	case len(p.working) > 0 && l.o.Write > 0 && time.Since(p.working[0].at) > l.o.Write/10:
		c = p.working[0]
	default:
		return nil
	}
	c.withdraw()
	l.o.Log.Warn("idle connection closed for a newcomer", "listener", l.o.Name, "peer", c.Peer)
	go c.Close()
	return c
}

// evictOldest frees a descriptor.
func (l *Listener) evictOldest() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	p := l.heaviest()
	return p != nil && l.evict(p) != nil
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

// withdraw removes a connection from the candidates for eviction. l.mu is held.
func (c *Conn) withdraw() {
	if c.deadline != nil {
		c.deadline.Stop()
	}
	c.ending = true
	if c.index >= 0 {
		heap.Remove(c.l.peers[c.Peer].of(c.state), c.index)
	}
}

// Release reports that the caller has read everything and closed all received descriptors: see
// [Options].Held.
func (c *Conn) Release() {
	c.l.mu.Lock()
	defer c.l.mu.Unlock()
	if c.uses--; c.uses == 0 {
		c.uncount()
	}
}

// uncount ends the counting of an unused connection. l.mu is held.
func (c *Conn) uncount() {
	close(c.left)
	if !c.counted {
		return
	}
	c.counted = false
	p := c.l.peers[c.Peer]
	if c.state != admitted {
		c.l.count--
	}
	if p.all--; p.all == 0 {
		delete(c.l.peers, c.Peer)
	}
}

// late closes a connection not admitted in time.
func (c *Conn) late() {
	c.l.mu.Lock()
	if c.state != waiting {
		c.l.mu.Unlock()
		return
	}
	c.withdraw()
	c.l.mu.Unlock()
	c.Close()
}

// Admit removes an identified connection from the limits of strangers. It returns false if the
// connection is already closed.
func (c *Conn) Admit() bool {
	l := c.l
	l.mu.Lock()
	defer l.mu.Unlock()
	if c.state == admitted {
		return true // trusted
	}
	if !c.counted || c.ending {
		return false
	}
	c.deadline.Stop()
	p := l.peers[c.Peer]
	c.to(p, admitted)
	l.count--
	if c.Peer.kind == unixUser {
		return true
	}
	c.counted = false // from now on its name bounds its connections, not its address
	if p.all--; p.all == 0 {
		delete(l.peers, c.Peer)
	}
	return true
}

// working sets the state of an HTTP connection: busy or waiting.
func (c *Conn) working(s state) {
	l := c.l
	l.mu.Lock()
	defer l.mu.Unlock()
	if !c.counted || c.ending || c.state == admitted {
		return
	}
	c.deadline.Stop() // net/http has its own from now on
	c.to(l.peers[c.Peer], s)
}

// Close implements net.Conn. The first call returns when no reader uses the connection any more.
func (c *Conn) Close() (err error) {
	c.close.Do(func() {
		c.l.mu.Lock()
		c.withdraw()
		c.l.mu.Unlock()
		err = end(c.Conn)
		c.Release()
	})
	return err
}

// ages are connections, the oldest in its state first.
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
