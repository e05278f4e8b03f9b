// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weir-project/weir/lab/routers"
)

const (
	records = 3                      // in an IPFIX message
	refresh = 50                     // messages per IPFIX template
	retry   = 250 * time.Millisecond // between two attempts to connect
	answer  = 30 * time.Second       // timeout of a router for a connection, or a write
)

// lane is one router's traffic by one way: its IPFIX and its BMP session.
type lane struct {
	dev       *routers.Device
	collector int // index of its collector
	to        netip.AddrPort
	dial      *routers.Dialer

	udp net.Conn
	seq uint32 // IPFIX records sent
	n   uint32 // routes sent
	buf []byte

	mu      sync.Mutex
	session net.Conn // nil without a session

	lost     atomic.Int64       // sessions not ended by the router
	sessions atomic.Int64       // opened sessions
	sent     map[uint32]*[2]int // by epoch: IPFIX records, routes
}

// open opens the socket for IPFIX, and starts holding a BMP session.
func (l *lane) open(ctx context.Context) error {
	var err error
	if l.udp, err = l.dial.Dial("udp", l.dev.Addr, l.to); err != nil {
		return err
	}
	return reportDrops(l.udp)
}

// keepUp keeps a BMP session up until the run ends.
func (l *lane) keepUp(ctx context.Context) {
	for ctx.Err() == nil {
		c, err := l.connect()
		if err != nil {
			_ = pause(ctx, retry)
			continue
		}
		stop := context.AfterFunc(ctx, func() { c.Close() })
		l.set(c)
		_, _ = c.Read(make([]byte, 1)) // a collector never sends: this returns at the end of the session
		l.set(nil)
		if stop() {
			l.lost.Add(1)
			c.Close()
		}
	}
}

// connect opens a session like a router.
func (l *lane) connect() (net.Conn, error) {
	c, err := l.dial.Dial("tcp", l.dev.Addr, l.to)
	if err != nil {
		return nil, err
	}
	_ = c.SetWriteDeadline(time.Now().Add(answer))
	b := l.dev.PeerUp(l.dev.Initiation(nil), int(l.sessions.Add(1)), time.Now())
	if _, err := c.Write(b); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

func (l *lane) set(c net.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.session = c
}

func (l *lane) count(epoch uint32) *[2]int {
	if l.sent == nil {
		l.sent = map[uint32]*[2]int{}
	}
	if l.sent[epoch] == nil {
		l.sent[epoch] = new([2]int)
	}
	return l.sent[epoch]
}

// flows sends one IPFIX message. A refused datagram counts as sent: the router lost it.
func (l *lane) flows(ctx context.Context, epoch uint32, template bool) {
	l.buf = l.dev.IPFIX(l.buf[:0], l.seq, template || l.seq%(refresh*records) == 0, records, epoch, time.Now())
	for range 3 {
		// The error may belong to an earlier datagram. This one was not sent then.
		if err := sendDatagram(ctx, l.udp, l.buf); err == nil {
			break
		}
	}
	l.seq += records
	l.count(epoch)[0] += records
}

// route sends one route, if a session exists.
func (l *lane) route(epoch uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.session == nil {
		return
	}
	l.buf = l.dev.RouteMonitoring(l.buf[:0], l.n, epoch, time.Now())
	_ = l.session.SetWriteDeadline(time.Now().Add(answer))
	if _, err := l.session.Write(l.buf); err != nil {
		l.session.Close() // half a message may have been sent; keepUp notices
		return
	}
	l.n++
	l.count(epoch)[1]++
}
