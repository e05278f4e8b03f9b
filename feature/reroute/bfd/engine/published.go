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

// Published is the engine of a network namespace, as its pins say.
type Published struct {
	Scope string
	name  string   // of the instance; "": instanceName
	ID    netns.ID // of the namespace
	Text  []byte   // see Engine.Record; "null": there is none
	Other bool     // its programs are another weir's: see Upgrade
}

// All are the engines of this host, without those of sessions that bfdd hands over.
func All(r *kernel.Root) ([]Published, instances.Unreadable, error) { return all(r, instanceName) }

// AllHanded are those of sessions that bfdd hands over (OpenHanded), also such as nobody runs any more: see Beat.
func AllHanded(r *kernel.Root) ([]Published, instances.Unreadable, error) { return all(r, handedName) }

func all(r *kernel.Root, name string) (out []Published, unreadable instances.Unreadable, err error) {
	store := storeFor(name)
	found, unreadable, err := store.All(r)
	for _, rec := range found {
		out = append(out, Published{Scope: rec.Scope, name: name, ID: rec.ID(), Text: rec.Spec, Other: store.Outdated(rec)})
	}
	return out, unreadable, err
}

// Instance is its unit of publication.
func (p Published) Instance() kernel.Instance {
	return instanceKey(p.Scope, cmp.Or(p.name, instanceName))
}

// Sessions reads all sessions, by discriminator.
func (p Published) Sessions(r *kernel.Root) (map[uint32]Status, error) {
	out := map[uint32]Status{}
	return out, p.each(r, func(c *bpf.BfdBfdSetup, s *bpf.BfdBfdState, e *bpf.BfdBfdEcho) { out[c.Mine] = newStatus(c, s, e) })
}

// Identities reads between whom sessions are, by discriminator.
func (p Published) Identities(r *kernel.Root) (map[uint32]Identity, error) {
	out := map[uint32]Identity{}
	return out, p.each(r, func(c *bpf.BfdBfdSetup, _ *bpf.BfdBfdState, _ *bpf.BfdBfdEcho) { out[c.Mine] = identity(c) })
}

// Tick is when the sessions' programs last ran (CLOCK_MONOTONIC): those of bfdd run as long as somebody holds their links.
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
	for place := range min(clock.Sessions, maxSessions) { // programs look no farther, either
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

// Upgrade puts this weir's programs in place of another's, over the same maps: a packet meets one or the other, and no session
// changes its state.
func Upgrade(ctx context.Context, l *kernel.WriteLock, ns *netns.Handle, tick time.Duration) error {
	e, err := OpenWith(ctx, l, ns, tick)
	if err != nil {
		return err
	}
	defer e.Close()
	return e.upgrade(ctx, l)
}

// RemoveScope takes BFD of a namespace away, as Remove does.
func RemoveScope(l *kernel.WriteLock, scope string) error {
	return errors.Join(l.Remove(instanceKey(scope, instanceName)), l.Remove(instanceKey(scope, handedName)))
}
