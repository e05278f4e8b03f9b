// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"time"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
)

// early is a Flip ahead of the Buffer message of its move. A source may send the session before its Buffer message arrives here.
// The destination's Flip arrives by another connection and can be faster. Rejecting the Flip would end the move.
type early struct {
	a     *Agent
	k     Key
	c     *peer.Conn
	in    peer.Frame
	timer *time.Timer
	over  bool // waiting has ended
}

// earlyFor is the longest wait of an early Flip.
const earlyFor = 100 * time.Millisecond

// tooEarly reports whether a message is an early Flip.
func (a *Agent) tooEarly(k Key, fl *Flow, from move.Backend, m move.Message) bool {
	e := a.early[k]
	return m.Kind == move.Flip && fl.Owner != from && fl.To == 0 && fl.Nonce != 0 && m.Epoch > fl.Epoch &&
		(e == nil || !e.over && e.c.Peer.Number == from && e.in.Message.Epoch == m.Epoch)
}

// wait stores an early Flip. A repeated one replaces it without extending the wait. The caller holds mu.
func (a *Agent) wait(k Key, c *peer.Conn, in peer.Frame) {
	if e := a.early[k]; e != nil {
		e.c, e.in = c, in
		return
	}
	e := &early{a: a, k: k, c: c, in: in}
	a.early[k] = e
	e.timer = a.after(earlyFor, func() {
		if a.early[k] != e {
			return
		}
		if err := e.now(); err != nil {
			a.o.Log.Warn("cannot process early flip", "flow", k.Client, "err", err)
		}
	})
}

// now decides the Flip. The caller holds mu.
func (e *early) now() error {
	e.timer.Stop()
	e.over = true
	defer delete(e.a.early, e.k)
	return e.a.decide(e.c, e.in)
}
