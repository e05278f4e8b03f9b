// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"context"
	"testing"
	"time"
)

// TestOutboxLatest checks that the latest announcement replaces earlier ones, pings count as one, and
// a rejection is repeated until the next accepted registration.
func TestOutboxLatest(t *testing.T) {
	c := &Conn{out: outbox{wake: make(chan struct{}, 1)}}
	for idle := range int64(100) {
		c.Post(Peers{Idle: idle})
		c.PostPing()
	}
	c.Reject("weight")
	if ping, next := c.out.consume(); !ping || next == nil || next.Idle != 99 || next.Rejected != "weight" {
		t.Errorf("ping %t, %+v: want the latest announcement with the rejection", ping, next)
	}
	if ping, next := c.out.consume(); ping || next != nil {
		t.Errorf("ping %t, %+v again", ping, next)
	}
	c.Post(Peers{Idle: 1})
	if _, next := c.out.consume(); next.Rejected != "weight" {
		t.Errorf("%+v: want the rejection repeated", next)
	}
	c.Post(Peers{Idle: 2})
	c.Registered()
	if _, next := c.out.consume(); next.Rejected != "" || next.Idle != 2 {
		t.Errorf("%+v: want no rejection", next)
	}
	c.Reject("again")
	if _, next := c.out.consume(); next == nil || next.Rejected != "again" {
		t.Errorf("%+v: want the rejection alone", next)
	}
}

// TestPace checks that registrations above the burst wait for their time, and idle time counts up to
// the burst.
func TestPace(t *testing.T) {
	const every, burst = time.Second, 4
	var p pace
	now := time.Now()
	for i := range 8 {
		want := max(0, time.Duration(i+1-burst)*every)
		if got := p.delay(now, every, burst); got != want {
			t.Errorf("event %d: %s, want %s", i, got, want)
		}
	}
	if got := p.delay(now.Add(time.Hour), every, burst); got != 0 {
		t.Errorf("after an hour: %s", got)
	}
}

// TestDeliverEnds checks that Deliver returns with its context.
func TestDeliverEnds(t *testing.T) {
	c := &Conn{out: outbox{wake: make(chan struct{}, 1)}}
	ctx, cancel := context.WithCancel(t.Context())
	told := make(chan Peers)
	done := make(chan struct{})
	go func() {
		defer close(done)
		c.Deliver(ctx, func(p Peers) { told <- p })
	}()
	c.Post(Peers{Idle: 7})
	if p := <-told; p.Idle != 7 {
		t.Errorf("%+v", p)
	}
	cancel()
	<-done
}
