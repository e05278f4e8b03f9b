// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"maps"

	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/service"
)

// followCopies attaches the copy filter to new devices, and detaches it from new ports of a bridge or bond.
func (w *watcher) followCopies(ctx context.Context, st state.State) {
	copied := map[string]*state.Service{}
	for i := range st.Services {
		if s := &st.Services[i]; s.Record.Service.Copy != "" && !s.Bypassed {
			copied[s.PinScope] = s
		}
	}
	maps.DeleteFunc(w.copying, func(scope string, _ map[uint32]uint32) bool { return copied[scope] == nil })
	for scope, s := range copied {
		now, err := copyDevices(s)
		if err == nil && !maps.Equal(w.copying[scope], now) {
			if err = w.syncCopies(ctx, scope); err == nil {
				w.copying[scope] = now
			}
		}
		key := slots.Slot{Scope: scope, Service: s.Name, Slot: -3}
		text := ""
		if err != nil {
			text = err.Error()
		}
		if w.said.Changed(key, text) && err != nil && ctx.Err() == nil {
			w.log.Warn("datagrams of new devices are not copied", "service", s.Name, "err", text)
		}
	}
}

func (w *watcher) syncCopies(ctx context.Context, scope string) error {
	l, unlock, err := w.own.Lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	return engine.ReconcileCopies(l, scope, true)
}

// copyDevices returns the devices of the service's namespace with packets for the host.
func copyDevices(s *state.Service) (devices map[uint32]uint32, err error) {
	ns, err := s.OpenNetns()
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	err = ns.Do(func() error { devices, err = spec.CopyDevices(); return err })
	return devices, err
}

// A service with generations gives a slot to the next process of its member: the new number in the pidfile, or another
// process of the unit or the cgroup, with its own sockets. weir serve searches for it while the slot is served.

// succeed searches for the next generation of a served slot.
func (w *watcher) succeed(ctx context.Context, s *state.Service, slot slots.State, m service.Member) {
	if s.Record.Service.Generations == nil || slot.Drains != 0 {
		return // one at a time
	}
	n := m
	n.Not = slot.Cookies()
	key := slots.Slot{Scope: s.PinScope, Service: s.Name, Slot: slot.Slot}
	if _, err := engine.FindMember(s.Record, ctx, key, n); err != nil {
		return // none, or not complete yet
	}
	w.admit(ctx, s, slot.Slot, n)
}

// fallBack gives a slot without its member to the previous generation if that still runs.
func (w *watcher) fallBack(ctx context.Context, s *state.Service, slot int) bool {
	l, unlock, err := w.own.Lock(ctx)
	if err != nil {
		return false
	}
	defer unlock()
	key := slots.Slot{Scope: s.PinScope, Service: s.Name, Slot: slot}
	back, err := engine.FallBack(l, key)
	if err != nil || back {
		w.say(key, err, "slot returned to the previous generation")
	}
	return back
}
