// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"time"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
)

// owned is the epoch of a session owned by this backend. It may be outdated: the session may have ended, and the port
// may be in use again.
type owned struct {
	session uint64 // number at the keeper: the cookie of its socket
	epoch   move.Epoch
	doubt   bool // the load balancer may have another epoch, or none: ask it before the next move

	nonce move.Nonce // of the load balancer's record
	by    uint64     // instance of the load balancer's agent that sent it
	at    time.Time
}

// nonceTime is the validity of a nonce, within one incarnation of the load balancer's agent. A load balancer does not
// forget a recently reported flow so soon, and after a reboot it has a new agent.
const nonceTime = time.Minute

func (a *Agent) setEpoch(id peer.Flow, o owned) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.epochs) >= maxEpochs {
		clear(a.epochs) // the load balancer has them, too
	}
	a.epochs[id] = o
}

// lookupEpoch returns the remembered epoch and nonce of a session. known is false if the load balancer must be asked.
// The nonce is 0 if it is not recent.
func (a *Agent) lookupEpoch(s *sending) (e move.Epoch, b move.Nonce, known bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	o := a.epochs[s.id]
	if o.session != s.session {
		delete(a.epochs, s.id)
		return 0, 0, false
	}
	if c := a.lb.conn(); c != nil && o.by == c.Peer.Instance && time.Since(o.at) < nonceTime {
		b = o.nonce
	}
	return o.epoch, b, !o.doubt
}

// maxEpochs is the maximum of remembered epochs.
const maxEpochs = 1 << 18
