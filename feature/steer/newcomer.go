// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"

	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/service"
)

// A service with generations gives a slot to the next process that its member names:
// the pidfile's new number, another process of the unit or the cgroup, with sockets of
// its own. weir serve looks for one while the slot is served.

// succeed looks for the next generation of a slot that is served.
func (w *watcher) succeed(ctx context.Context, s *state.Service, slot slots.State, m service.Member) {
	if s.Record.Service.Generations == nil || slot.Drains != 0 {
		return // one after the other
	}
	n := m
	n.Not = slot.Cookies()
	key := slots.Slot{Scope: s.PinScope, Service: s.Name, Slot: slot.Slot}
	if _, err := engine.FindMember(s.Record, ctx, key, n); err != nil {
		return // nobody, or not whole yet
	}
	w.admit(ctx, s, slot.Slot, n)
}

// fallBack gives a slot whose member is gone to the generation before, while that lives.
func (w *watcher) fallBack(ctx context.Context, s *state.Service, slot int) bool {
	l, unlock, err := w.own.Lock(ctx)
	if err != nil {
		return false
	}
	defer unlock()
	key := slots.Slot{Scope: s.PinScope, Service: s.Name, Slot: slot}
	back, err := engine.FallBack(l, key)
	if err != nil || back {
		w.say(key, err, "slot given back to the generation before")
	}
	return back
}
