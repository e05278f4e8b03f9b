// SPDX-License-Identifier: Apache-2.0

package templates

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// Exporters repeat their templates about every ten minutes. Until then a collector that starts or gains a device cannot
// decode their records. Therefore weir serve remembers templates, off the data path. It replays them to a member
// without them, from the exporter's own address and port.

// Tick is the polling interval while work is waiting: a slow member, or a session whose exporter may have changed its
// port. Otherwise the watcher notifies the keeper of changes.
const Tick = 100 * time.Millisecond

// Keeper keeps the templates of all namespaces.
type Keeper struct {
	root   *kernel.Root
	own    *feature.OwnLock
	log    feature.Logger
	state  *state.Reader
	wake   chan struct{}
	news   chan struct{} // from the scopes: a session may be due
	scopes map[string]*Scope
	seen   []seenMembers
	said   feature.Reported[string] // by namespace
}

// seenMembers is the part of a service that determines its members.
type seenMembers struct {
	pub    *record.Service
	engine *kernel.Opened
	slots  []slots.State
}

// NewKeeper returns a keeper of all namespaces' templates. It writes under own.
func NewKeeper(own *feature.OwnLock, log feature.Logger) *Keeper {
	return &Keeper{root: own.Root, own: own, log: log, state: state.NewReader(own.Root), wake: make(chan struct{}, 1),
		news: make(chan struct{}, 1), scopes: map[string]*Scope{}}
}

// Kick reports that services or their members may have changed.
func (k *Keeper) Kick() { Notify(k.wake) }

// Notify sends to a channel with a buffer of one, without blocking.
func Notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Run keeps templates until ctx is done.
func (k *Keeper) Run(ctx context.Context) {
	defer func() {
		for _, t := range k.scopes {
			k.close(t)
		}
		k.state.Close()
	}()
	tick := time.NewTimer(Tick) // while a timeout is pending
	defer tick.Stop()
	expire := time.NewTicker(time.Minute)
	defer expire.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-expire.C:
			for _, t := range k.scopes {
				t.expire()
				t.tell()
			}
		case <-k.wake:
			k.follow(ctx)
		case <-k.news:
		case <-tick.C:
		}
		if k.changed() { // otherwise templates sent to a previous member would count as received
			k.follow(ctx)
		}
		for _, t := range k.scopes {
			t.arrive()
		}
		k.replay(ctx)
		if k.pending() {
			tick.Reset(Tick)
		} else {
			tick.Stop() // waking ten times a second would take half a percent of a CPU
		}
	}
}

// pending reports whether work remains without a notification.
func (k *Keeper) pending() bool {
	for _, t := range k.scopes {
		if t.pending() {
			return true
		}
	}
	return false
}

// replay sends templates where members have changed or a session waits.
func (k *Keeper) replay(ctx context.Context) {
	for scope, t := range k.scopes {
		if t.Waiting() {
			k.say(scope, t.Replay(ctx))
		}
	}
}

// changed reports whether a slot has another member than at the last reading.
func (k *Keeper) changed() bool {
	for _, t := range k.scopes {
		for _, s := range t.Services {
			now, err := s.readMembers()
			if err == nil && !slices.Equal(now, s.members) {
				return true
			}
		}
	}
	return false
}

// ReadServiceMembers opens a service's slots and reads their members.
func ReadServiceMembers(r *kernel.Root, s *state.Service) (*Service, error) {
	pins, err := r.Open(record.EngineInstance(s.PinScope, s.Engine), append(s.Record.ReaderMaps(), "sync")...)
	if err != nil {
		return nil, err
	}
	out := &Service{Service: s, slots: slots.NewReader(r, pins, s.Record)}
	if out.members, err = out.readMembers(); err != nil {
		out.close()
		return nil, err
	}
	// Read after the service: if the maps match the pins now, packets follow the service as read.
	if out.coming, err = engine.IsMarked(pins.Maps); err != nil {
		out.close()
		return nil, err
	}
	return out, nil
}

// follow updates the scopes to the namespaces of services with templates. It runs after every possible change; usually
// nothing has changed.
func (k *Keeper) follow(ctx context.Context) {
	st, err := k.state.Read(ctx)
	if err != nil {
		if ctx.Err() == nil {
			k.say("", err)
		}
		return
	}
	if !k.unchanged(st) || k.stale() || k.changed() {
		k.update(ctx, st)
		if k.lags() { // a slot changed its member meanwhile
			if st, err = k.state.Read(ctx); err == nil && !k.unchanged(st) {
				k.update(ctx, st)
			}
		}
		return
	}
	for scope, t := range k.scopes {
		t.mu.Lock()
		err := t.flushCounts()
		t.mu.Unlock()
		k.say(scope, err)
	}
}

// lags reports whether a slot's member differs from the state, because the state was read earlier.
func (k *Keeper) lags() bool {
	for _, t := range k.scopes {
		for _, s := range t.Services {
			for n, who := range s.members {
				if n >= len(s.Slots) || s.Slots[n].Admitted() != (who != MemberID{}) || who != (MemberID{}) && s.Slots[n].PID != int(who.Tgid) {
					return true
				}
			}
		}
	}
	return false
}

// unchanged reports whether services and members are the same as at the last call.
func (k *Keeper) unchanged(st state.State) (same bool) {
	var now []seenMembers
	for _, s := range st.Services {
		now = append(now, seenMembers{s.Record, k.state.Engines[record.EngineInstance(s.PinScope, s.Engine)], s.Slots})
	}
	same = slices.EqualFunc(k.seen, now, func(a, b seenMembers) bool {
		return a.pub == b.pub && a.engine == b.engine && slices.EqualFunc(a.slots, b.slots, func(x, y slots.State) bool {
			return x.State == y.State && x.PID == y.PID && slices.Equal(x.Sockets, y.Sockets)
		})
	})
	k.seen = now
	return same
}

// stale reports whether a scope is obsolete: its pins were replaced or its namespace is abandoned.
func (k *Keeper) stale() bool {
	for _, t := range k.scopes {
		if !t.Store.pinned(k.root) || slices.ContainsFunc(t.Services, func(s *Service) bool { return abandoned(s.Service) }) {
			return true
		}
	}
	return false
}

// update updates the scopes to a state.
func (k *Keeper) update(ctx context.Context, st state.State) {
	services := map[string][]*Service{}
	wanted := map[string]*state.Service{}
	for i := range st.Services {
		s := &st.Services[i]
		members, err := ReadServiceMembers(k.root, s)
		if err != nil {
			continue // being removed, or without its engine: status reports it
		}
		services[s.PinScope] = append(services[s.PinScope], members)
		if len(servicePorts(s)) > 0 {
			wanted[s.PinScope] = s
		}
	}
	defer func() {
		for scope, all := range services {
			for _, s := range all {
				if k.scopes[scope] == nil { // not taken over by a scope
					s.close()
				}
			}
		}
	}()
	for scope, t := range k.scopes {
		if s := wanted[scope]; s == nil || !t.Store.pinned(k.root) || abandoned(s) {
			k.close(t)
		}
	}
	for scope, s := range wanted {
		t := k.scopes[scope]
		if t == nil {
			err := k.open(ctx, s, services[scope])
			if err != nil {
				k.seen = nil // try again
			}
			k.say(scope, err)
			continue
		}
		t.mu.Lock()
		if !sameServices(t.Services, services[scope]) {
			t.unserved, t.retries = true, 0
		}
		dateChanges(t.Services, services[scope])
		t.mu.Unlock()
		k.say(scope, t.follow(services[scope]))
	}
}

// abandoned reports whether only weir keeps a service's namespace alive. An open handle would keep a container's
// interfaces and addresses.
func abandoned(s *state.Service) bool {
	ns, err := s.OpenNetns()
	if err != nil {
		return errors.Is(err, slots.ErrNetnsGone)
	}
	ns.Close()
	return false
}

// sameServices reports whether all traffic goes to the same members.
func sameServices(a, b []*Service) bool {
	return slices.EqualFunc(a, b, func(x, y *Service) bool {
		return x.Name == y.Name && slices.Equal(x.members, y.members) && slices.Equal(x.Table, y.Table) &&
			x.Record == y.Record &&
			slices.EqualFunc(x.Slots, y.Slots, func(p, q slots.State) bool { return p.State == q.State })
	})
}

// dateChanges records the time of each service's last change. A message processed now may have been steered before it.
func dateChanges(before, now []*Service) {
	for _, s := range now {
		i := slices.IndexFunc(before, func(b *Service) bool { return b.Name == s.Name })
		switch {
		case i < 0 || before[i].Record != s.Record:
			s.since = kernel.Monotonic()
		default:
			s.since = before[i].since
		}
	}
}

// open starts keeping the templates of a service's namespace.
func (k *Keeper) open(ctx context.Context, s *state.Service, services []*Service) error {
	ns, err := s.OpenNetns()
	if err != nil {
		return err
	}
	store, err := k.openStore(ctx, s, ns)
	if err == nil {
		k.scopes[s.PinScope], err = OpenScope(store, ns, services, k.log, k.news)
	}
	if err != nil {
		delete(k.scopes, s.PinScope)
		ns.Close()
		return fmt.Errorf("keep templates: %w", err)
	}
	exporters, templates := k.scopes[s.PinScope].Known()
	k.log.Info("listening for templates", "netns", s.Netns, "known_exporters", exporters, "known_templates", templates)
	return nil
}

// openStore opens the store. It holds the lock only for that, because commands wait for it.
func (k *Keeper) openStore(ctx context.Context, s *state.Service, ns *netns.Handle) (*templateStore, error) {
	l, unlock, err := k.own.Lock(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	// A service removed since the reading must not get new pins in its namespace.
	if _, err := record.Read(l.Root, record.Instance(s.PinScope, s.Name)); err != nil {
		return nil, err
	}
	return OpenStore(l, ns)
}

func (k *Keeper) close(t *Scope) {
	delete(k.scopes, t.scope)
	t.mu.Lock()
	err := t.flushCounts()
	t.mu.Unlock()
	k.say(t.scope, err)
	t.Close()
	t.ns.Close()
}

// say logs a problem of a namespace once.
func (k *Keeper) say(scope string, err error) {
	text := ""
	if err != nil && !errors.Is(err, kernel.ErrNotExist) && !errors.Is(err, context.Canceled) {
		text = err.Error()
	}
	if k.said.Changed(scope, text) && text != "" {
		k.log.Warn("cannot keep templates", "err", text)
	}
}
