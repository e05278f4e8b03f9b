// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"time"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/wire"
)

// retire ends a keeperClient whose backend, address or service was removed. The keeper knows its sessions by this
// member only. It therefore accepts no more sessions, stays until its present ones belong to a local member or
// another backend, and then sends Leave. Sessions given to it in between go to other members.
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
			// The answer follows all sessions given before Ready was read.
			err := p.call(&wire.Message{Type: wire.Ready})
			if p.maxBytes() == 0 || err == nil && !a.uses(p) {
				break
			}
		}
		select {
		case <-a.ctx.Done():
			return // the next agent continues
		case <-t.C:
		}
	}
	_ = p.post(&wire.Message{Type: wire.Leave})
}

// uses reports whether a keeperClient has a session under way.
func (a *Agent) uses(p *keeperClient) bool {
	leaving, arriving := a.all()
	for _, s := range leaving {
		if s.by == p {
			return true
		}
	}
	for _, r := range arriving {
		if !r.mu.TryLock() { // it is in use
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
