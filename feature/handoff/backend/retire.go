// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"time"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/wire"
)

// retire ends a place that is not known any more: a way to a backend that the load balancer tells of no more, or at another
// address, or one of a service that has gone. Sessions that it has are told to the keeper by it alone, as its member: it takes
// no more of them, stays for those until they are a member's of this backend, or another backend's, and then says goodbye. What
// the keeper may have given it in between is for others then.
func (a *Agent) retire(p *keeperClient) {
	defer p.stop()
	p.mu.Lock()
	p.over = true
	p.mu.Unlock()
	p.setReady(false)
	t := time.NewTicker(tick)
	defer t.Stop()
	for {
		if !a.uses(p) {
			// Its answer is behind all that the keeper gave before it heard that.
			err := p.call(&wire.Message{Type: wire.Ready})
			if p.maxBytes() == 0 || err == nil && !a.uses(p) {
				break
			}
		}
		select {
		case <-a.ctx.Done():
			return // the next agent goes on
		case <-t.C:
		}
	}
	_ = p.post(&wire.Message{Type: wire.Leave})
}

// uses says whether a session is on its way by a place.
func (a *Agent) uses(p *keeperClient) bool {
	leaving, arriving := a.all()
	for _, s := range leaving {
		if s.by == p {
			return true
		}
	}
	for _, r := range arriving {
		if !r.mu.TryLock() { // something is being done with it
			return true
		}
		used := r.home == p && (r.fd >= 0 || r.built != nil || r.dst.Phase == move.Restoring || r.dst.Phase == move.Flipping)
		r.mu.Unlock()
		if used {
			return true
		}
	}
	return false
}
