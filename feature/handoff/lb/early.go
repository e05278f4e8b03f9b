// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"time"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
)

// early is a Flip that has come before the Hold of its move. A source that goes ahead sends the session while its Hold is on its way
// here, by another connection than the destination's answer to it. To refuse the Flip would end the move.
type early struct {
	a     *Agent
	k     Key
	c     *peer.Conn
	in    peer.Frame
	timer *time.Timer
	over  bool // it waits no longer
}

// earlyFor is how long a Flip waits for its Hold.
const earlyFor = 100 * time.Millisecond

// tooEarly says that a message is such a Flip.
func (a *Agent) tooEarly(k Key, fl *Flow, from move.Backend, m move.Message) bool {
	e := a.early[k]
	return m.Kind == move.Flip && fl.Owner != from && fl.To == 0 && fl.Nonce != 0 && m.Epoch > fl.Epoch &&
		(e == nil || !e.over && e.c.Peer.Number == from && e.in.Message.Epoch == m.Epoch)
}

// wait has a Flip wait. One that is said again, by another connection or the same, waits no longer for that. a.mu is held.
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
			a.o.Log.Warn("a move that nobody has announced", "flow", k.Client, "err", err)
		}
	})
}

// now decides it. a.mu is held.
func (e *early) now() error {
	e.timer.Stop()
	e.over = true
	defer delete(e.a.early, e.k)
	return e.a.decide(e.c, e.in)
}
