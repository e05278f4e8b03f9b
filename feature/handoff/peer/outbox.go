// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"context"
	"sync"
	"time"
)

// outbox has the next ping and the latest announcement of a connection. A goroutine of the
// connection sends them, so a peer that does not read delays nobody else.
type outbox struct {
	mu       sync.Mutex
	ping     bool
	next     *Peers // a later announcement replaces it; nil: none
	rejected string // why the latest registration was rejected; "": it was not
	wake     chan struct{}
}

// PostPing sends a ping soon. Pings not sent yet count as one.
func (c *Conn) PostPing() {
	c.out.mu.Lock()
	defer c.out.mu.Unlock()
	c.out.ping = true
	c.out.wakes()
}

// Post sends an announcement soon, in place of an earlier one not sent yet. It repeats the latest
// rejection until Registered.
func (c *Conn) Post(p Peers) {
	c.out.mu.Lock()
	defer c.out.mu.Unlock()
	p.Rejected = c.out.rejected
	c.out.next = &p
	c.out.wakes()
}

// Reject reports a rejected registration soon, and with each announcement until Registered.
func (c *Conn) Reject(reason string) {
	c.out.mu.Lock()
	defer c.out.mu.Unlock()
	c.out.rejected = reason
	if c.out.next == nil {
		c.out.next = &Peers{}
	}
	c.out.next.Rejected = reason
	c.out.wakes()
}

// Registered ends the repetition of a rejection.
func (c *Conn) Registered() {
	c.out.mu.Lock()
	defer c.out.mu.Unlock()
	c.out.rejected = ""
	if c.out.next != nil {
		c.out.next.Rejected = ""
	}
}

func (o *outbox) wakes() {
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

func (o *outbox) consume() (ping bool, next *Peers) {
	o.mu.Lock()
	defer o.mu.Unlock()
	ping, next = o.ping, o.next
	o.ping, o.next = false, nil
	return ping, next
}

// Deliver sends posted pings, and announcements by tell, until ctx is done. An error closes the
// connection, so its Receive fails.
func (c *Conn) Deliver(ctx context.Context, tell func(Peers)) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.out.wake:
		}
		ping, next := c.out.consume()
		if ping {
			_ = c.Ping() // it closes the connection on an error
		}
		if next != nil {
			tell(*next)
		}
	}
}

// These limits bound the registrations of a connection. Each one costs an announcement.
const (
	registerBurst = 16
	registerEvery = 250 * time.Millisecond
)

// pace bounds the rate of an event. The zero value is ready.
type pace struct{ due time.Time }

// delay returns the wait before the next event, at most every.
func (p *pace) delay(now time.Time, every time.Duration, burst int) time.Duration {
	if idle := now.Add(-every * time.Duration(burst)); p.due.Before(idle) {
		p.due = idle
	}
	p.due = p.due.Add(every)
	return max(0, p.due.Sub(now))
}
