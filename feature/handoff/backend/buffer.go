// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"time"

	"github.com/weir-project/weir/feature/handoff/quarantine"
)

// await buffers packets here until the session's owner is known. The load balancer answers a Reclaim and forwards its
// buffered packets at once, before this agent knows the owner. Packets sent back would loop, and soon be dropped.
// s.mu is held.
func (a *Agent) await(s *sending) {
	if s.parked {
		return
	}
	var err error
	if s.parked, err = a.quarantine.BufferShut(s.flow, s.kept.Epoch); err != nil {
		a.o.Log.Warn("cannot buffer packets, the client retransmits them", "flow", s.flow, "err", err)
	}
}

// release forwards packets buffered here. If the session stays they go to its socket. Otherwise they go back to the
// load balancer, which buffers them or forwards them to the owner. s.mu is held.
func (a *Agent) release(s *sending, stays bool) {
	if !s.parked {
		return
	}
	s.parked = false
	to := quarantine.Shut
	if stays {
		to = quarantine.Pass
	}
	if err := a.quarantine.Release(s.flow, s.kept.Epoch, to); err != nil {
		a.o.Log.Warn("buffered packets lost, the client retransmits them", "flow", s.flow, "err", err)
	}
	time.AfterFunc(tick, func() {
		if err := a.quarantine.Late(); err != nil {
			a.o.Log.Warn("late packets lost, clients retransmit them", "err", err)
		}
	})
}
