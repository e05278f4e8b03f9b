// SPDX-License-Identifier: Apache-2.0

// Package reroute moves traffic off a broken link within tens of milliseconds, and never off a working one. All of it
// happens in the kernel; this package is the interface to the host.
//
// Package liveness detects failures. Package protect sends packets another way by segments (SRv6), and package plan
// computes the segments. Package bfd is for neighbours without weir.
package reroute

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/reroute/bfd/engine"
	"github.com/weir-project/weir/feature/reroute/bfd/peers"
	"github.com/weir-project/weir/feature/reroute/liveness"
	"github.com/weir-project/weir/feature/reroute/protect"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
)

// Name is the feature's name: pin directory, config key, CLI noun.
const Name = liveness.Name

// Feature implements the interfaces of package feature.
type Feature struct{}

var (
	_ feature.Feature[Config, State] = Feature{}
	_ feature.Upgrader               = Feature{}
	_ feature.Recoverer              = Feature{}
	_ feature.Measured               = Feature{}
	_ feature.Examiner               = Feature{}
	_ feature.Explainer              = Feature{}
	_ feature.Runner                 = Feature{}
)

// Name implements feature.Feature.
func (Feature) Name() string { return Name }

// Shares implements feature.Shared. The instance of a bfdd belongs to its connection, not to the file.
func (Feature) Shares(instance string) bool { return instance != "@bfdd" }

// MapPrefixes implements feature.Mapped.
func (Feature) MapPrefixes() []string { return []string{"reroute_", "bfd_", "liveness_"} }

// PinnedMaps implements feature.Recorded.
func (Feature) PinnedMaps(i kernel.Instance) (names []string, ok bool) {
	if i.Feature != Name || i.Scope == kernel.HostScope {
		return nil, false
	}
	for _, of := range []map[string][]string{protect.PinnedMaps, liveness.PinnedMaps, engine.PinnedMaps} {
		if names, ok = of[i.Name]; ok {
			break
		}
	}
	return names, ok
}

// Needs implements feature.Feature: the needs of all parts, each once.
func (Feature) Needs(c Config) []kernel.Need {
	out := protect.Needs(c.protection())
	var sessions liveness.Config
	for _, l := range c.liveness() {
		sessions.Sessions = append(sessions.Sessions, l.Sessions...)
	}
	wants := liveness.Needs(sessions)
	if len(c.neighbours()) > 0 {
		wants = append(wants, engine.Needs()...)
	}
	for _, n := range wants {
		i := slices.IndexFunc(out, func(o kernel.Need) bool { return o.Name == n.Name })
		if i < 0 {
			out = append(out, n)
		} else {
			out[i].Optional = out[i].Optional && n.Optional
		}
	}
	return out
}

// State is the state of rerouting as read from the pins.
type State struct {
	Paths      []protect.PathState       `json:"paths"`    // never nil, for scripts iterating over it
	Sessions   []liveness.SessionState   `json:"sessions"` // never nil
	BFD        []peers.SessionState      `json:"bfd,omitempty"`
	TimerLoops []liveness.TimerLoopState `json:"timer_loops,omitempty"`
	// UnknownSources counts packets resembling probes, but without a session, by reason.
	UnknownSources map[string]uint64    `json:"unknown_sources,omitempty"`
	Unreadable     instances.Unreadable `json:"unreadable,omitempty"`

	protect protect.State
	live    liveness.State
	peers   peers.State
}

// Unread implements feature.Unreads.
func (st State) Unread() instances.Unreadable { return st.Unreadable }

// Err returns the error of unreadable instances, without damaged ones: faults report those.
func (st State) Err() error { return st.Unreadable.WithoutDamage().Err() }

// ReadState reads rerouting from its pins.
func ReadState(ctx context.Context, r *kernel.Root) (State, error) {
	p, err := protect.ReadState(ctx, r)
	if err != nil {
		return State{}, err
	}
	l, err := liveness.ReadState(ctx, r)
	if err != nil {
		return State{}, err
	}
	b, err := peers.ReadState(r)
	for _, s := range b.Sessions {
		for i := range p.Paths {
			if x := &p.Paths[i]; s.Unjudged && x.Device == s.Device && x.Netns == s.Netns {
				x.Unjudged = true
			}
		}
	}
	unreadable := slices.Concat(p.Unreadable, l.Unreadable, b.Unreadable)
	return State{Unreadable: unreadable, Paths: append([]protect.PathState{}, p.Paths...), Sessions: append([]liveness.SessionState{}, l.Sessions...), BFD: b.Sessions, TimerLoops: l.TimerLoops, UnknownSources: l.UnknownSources, protect: p, live: l, peers: b}, err
}

// State implements feature.Feature.
func (Feature) State(ctx context.Context, r *kernel.Root) (State, error) { return ReadState(ctx, r) }

// findNetns returns an error with its position for a path of a missing network namespace.
func (c *Config) findNetns() error {
	found := map[string]bool{}
	for _, p := range c.Paths {
		if found[p.Netns] {
			continue
		}
		ns, err := netns.Open(p.Netns)
		if err != nil {
			return p.Pos.Errorf("reroute.%s: netns: %w", p.Name, err)
		}
		ns.Close()
		found[p.Netns] = true
	}
	return nil
}

// Plan implements feature.Feature. Repairs come first, so a link found down already has them.
func (Feature) Plan(ctx context.Context, have State, want Config) (feature.Plan, error) {
	if err := want.findNetns(); err != nil {
		return feature.Plan{}, err
	}
	plan, err := protect.Plan(ctx, have.protect, want.protection())
	if err != nil {
		return plan, err
	}
	sessions, err := liveness.PlanAll(ctx, have.live, want.liveness())
	if err != nil {
		return plan, err
	}
	neighbours, err := peers.Plan(ctx, have.peers, want.neighbours())
	for _, p := range []feature.Plan{sessions, neighbours} {
		plan.Join(p)
	}
	outages(&plan, have, want)
	return plan, err
}

// Remove implements feature.Feature. Liveness goes before protection, because its link states would otherwise keep
// traffic rerouted until the end.
func (Feature) Remove(ctx context.Context, l *kernel.WriteLock) error {
	return errors.Join(peers.Remove(ctx, l), liveness.Remove(ctx, l), protect.Remove(ctx, l))
}

// Recover implements feature.Recoverer.
func (Feature) Recover(l *kernel.WriteLock) error {
	return errors.Join(protect.Recover(l), liveness.Recover(l))
}

// PlanUpgrade implements feature.Upgrader.
func (Feature) PlanUpgrade(ctx context.Context, r *kernel.Root) (feature.Plan, error) {
	plan, err := protect.PlanUpgrade(ctx, r)
	if err != nil {
		return plan, err
	}
	sessions, err := liveness.PlanUpgrade(ctx, r)
	if err != nil {
		return plan, err
	}
	neighbours, err := peers.PlanUpgrade(r)
	for _, p := range []feature.Plan{sessions, neighbours} {
		plan.Join(p)
	}
	return plan, err
}

// Run implements feature.Runner. It restarts loops, and follows devices, carriers and routes. It removes the
// instances of deleted network namespaces.
func (Feature) Run(ctx context.Context, r *kernel.Root, log feature.Logger) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var all sync.WaitGroup
	parts := []func(context.Context, *kernel.Root, feature.Logger) error{liveness.Run, protect.Run, peers.Run, tell, removeGone}
	errs := make([]error, len(parts))
	for i, run := range parts {
		all.Go(func() {
			errs[i] = run(ctx, r, log)
			cancel()
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

// Drain takes the link of a path out of use at once, until Undrain, regardless of its configuration.
func Drain(l *kernel.WriteLock, path string) error { return protect.Drain(l, path) }

// GoWithDown lists the destinations without a route once a path's interface is set down, or returns "".
func GoWithDown(r *kernel.Root, path string) (string, error) { return protect.GoWithDown(r, path) }

// Undrain ends the drain of a path's link. It is used again unless another reason exists.
func Undrain(l *kernel.WriteLock, path string) error { return protect.Undrain(l, path) }
