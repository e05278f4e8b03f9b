// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"errors"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
)

// A service with generations gives a slot to the next process that its member names:
// the pidfile's new number, another process of the unit or the cgroup, with sockets of
// its own. weir serve looks for one while the slot is served.

// succeed looks for the next generation of a slot that is served.
func (w *watcher) succeed(ctx context.Context, s *ServiceState, slot SlotState, m service.Member) {
	if s.pub.Service.Generations == nil || slot.drains != 0 {
		return // one after the other
	}
	n := m
	n.Not = slot.cookies()
	key := Slot{Scope: s.scope, Service: s.Name, Slot: slot.Slot}
	if _, err := s.pub.find(ctx, key, n); err != nil {
		return // nobody, or not whole yet
	}
	w.admit(ctx, s, slot.Slot, n)
}

// cookies are those of the slot's sockets, of both its generations.
func (s SlotState) cookies() map[uint64]bool {
	out := map[uint64]bool{}
	for _, c := range s.before {
		out[c] = true
	}
	for _, sock := range s.Sockets {
		out[sock.Cookie] = true
	}
	return out
}

// fallBack gives a slot whose member is gone to the generation before, while that lives.
func (w *watcher) fallBack(ctx context.Context, s *ServiceState, slot int) bool {
	l, unlock, err := w.own.lock(ctx)
	if err != nil {
		return false
	}
	defer unlock()
	key := Slot{Scope: s.scope, Service: s.Name, Slot: slot}
	back, err := fallBack(l, key)
	if err != nil || back {
		w.say(key, err, "slot given back to the generation before")
	}
	return back
}

func fallBack(l *kernel.WriteLock, s Slot) (bool, error) {
	e, p, err := openSlot(l, s)
	if err != nil {
		return false, err
	}
	defer e.Close()
	return e.fallBack(p, s.Slot)
}

// adopt finds a member's sockets: of a service with generations those of its next
// process, if there is one beside the one that serves.
func (e *engine) adopt(ctx context.Context, p *published, slot int, m service.Member, ns *netns.Handle) (*service.Adoption, error) {
	if p.Service.Generations != nil && m.Not == nil {
		now, err := judgeSlot(e.pins, p, slot)
		if err != nil {
			return nil, err
		}
		next := m
		if next.Not = now.cookies(); now.Admitted() {
			if a, err := next.Adopt(ctx, ns, p.Service.Spec); err == nil || !errors.Is(err, service.ErrNoSocket) {
				return a, err
			}
		}
	}
	return m.Adopt(ctx, ns, p.Service.Spec)
}
