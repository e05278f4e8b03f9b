// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"time"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
)

// owned is in which epoch a session is this backend's. Nobody says when it ends, and another may come from the same port.
type owned struct {
	session uint64 // to the keeper: the cookie of its socket
	epoch   move.Epoch
	doubt   bool // the load balancer may know another epoch, or none: it is asked before the next move

	nonce move.Nonce // of the load balancer's record
	by    uint64     // instance of the load balancer's agent that has said it
	at    time.Time
}

// nonceTime is for how long a birth is believed, and of no other life of the load balancer's agent. A load balancer forgets no flow so soon
// that it has just spoken of, and one whose machine has begun anew has a new agent.
const nonceTime = time.Minute

func (a *Agent) setEpoch(id peer.Flow, o owned) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.epochs) >= maxEpochs {
		clear(a.epochs) // the load balancer knows them, too
	}
	a.epochs[id] = o
}

// lookupEpoch is what is remembered of a session; known says that it need not be asked for. The birth is 0 where nobody has said it lately.
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

// maxEpochs are remembered.
const maxEpochs = 1 << 18
