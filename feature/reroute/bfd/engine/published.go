// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/weir-project/weir/feature/reroute/bfd/engine/bpf"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
)

// Published is the engine of a network namespace as stored in its pins.
type Published struct {
	Scope string
	name  string   // of the instance; "": instanceName
	ID    netns.ID // of the namespace
	Text  []byte   // see Engine.Record; "null": none
	Other bool     // its programs are another weir version's: see Upgrade
}

// All returns the engines of this host, except engines for bfdd's sessions.
func All(r *kernel.Root) ([]Published, instances.Unreadable, error) { return all(r, instanceName) }

// AllHanded returns the engines for bfdd's sessions (OpenHanded), including abandoned ones: see Tick.
func AllHanded(r *kernel.Root) ([]Published, instances.Unreadable, error) { return all(r, handedName) }

func all(r *kernel.Root, name string) (out []Published, unreadable instances.Unreadable, err error) {
	store := storeFor(name)
	found, unreadable, err := store.All(r)
	for _, rec := range found {
		out = append(out, Published{Scope: rec.Scope, name: name, ID: rec.ID(), Text: rec.Spec, Other: store.Outdated(rec)})
	}
	return out, unreadable, err
}

// Instance returns the engine's instance.
func (p Published) Instance() kernel.Instance {
	return instanceKey(p.Scope, cmp.Or(p.name, instanceName))
}

// Sessions reads all sessions by discriminator.
func (p Published) Sessions(r *kernel.Root) (map[uint32]Status, error) {
	out := map[uint32]Status{}
	return out, p.each(r, func(c *bpf.BfdBfdSetup, s *bpf.BfdBfdState, e *bpf.BfdBfdEcho) { out[c.Mine] = newStatus(c, s, e) })
}

// Identities reads the ends of all sessions by discriminator.
func (p Published) Identities(r *kernel.Root) (map[uint32]Identity, error) {
	out := map[uint32]Identity{}
	return out, p.each(r, func(c *bpf.BfdBfdSetup, _ *bpf.BfdBfdState, _ *bpf.BfdBfdEcho) { out[c.Mine] = identity(c) })
}

// Tick returns the time of the programs' last run (CLOCK_MONOTONIC). The programs of bfdd's sessions run while a
// process holds their links.
func (p Published) Tick(r *kernel.Root) (time.Duration, error) {
	o, err := r.Open(p.Instance(), "clock")
	if err != nil {
		return 0, err
	}
	defer o.Close()
	var c bpf.BfdBfdClockwork
	if err := o.Maps["clock"].Lookup(uint32(0), &c); err != nil {
		return 0, fmt.Errorf("reading BFD's clock: %w", err)
	}
	return time.Duration(c.Beat), nil
}

func (p Published) each(r *kernel.Root, yield func(*bpf.BfdBfdSetup, *bpf.BfdBfdState, *bpf.BfdBfdEcho)) error {
	o, err := r.Open(p.Instance(), "setups", "states", "echoes", "clock")
	if err != nil {
		return err
	}
	defer o.Close()
	var clock bpf.BfdBfdClockwork
	if err := o.Maps["clock"].Lookup(uint32(0), &clock); err != nil {
		return fmt.Errorf("reading BFD's clock: %w", err)
	}
	var c bpf.BfdBfdSetup
	var s bpf.BfdBfdState
	for place := range min(clock.Sessions, maxSessions) { // programs visit no more places either
		if err := errors.Join(o.Maps["setups"].Lookup(place, &c), o.Maps["states"].Lookup(place, &s)); err != nil {
			return fmt.Errorf("reading sessions: %w", err)
		}
		var e bpf.BfdBfdEcho
		if err := o.Maps["echoes"].Lookup(place, &e); err != nil {
			return fmt.Errorf("reading sessions: %w", err)
		}
		if c.Generation != 0 {
			yield(&c, &s, &e)
		}
	}
	return nil
}

// Upgrade replaces the programs of another weir version over the same maps. A packet meets one version or the other,
// and sessions keep their state.
func Upgrade(ctx context.Context, l *kernel.WriteLock, ns *netns.Handle, tick time.Duration) error {
	e, err := OpenWith(ctx, l, ns, tick)
	if err != nil {
		return err
	}
	defer e.Close()
	return e.upgrade(ctx, l)
}

// RemoveScope removes the BFD of a namespace, as Remove does.
func RemoveScope(l *kernel.WriteLock, scope string) error {
	return errors.Join(l.Remove(instanceKey(scope, instanceName)), l.Remove(instanceKey(scope, handedName)))
}
