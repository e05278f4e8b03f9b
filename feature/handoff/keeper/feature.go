// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"context"
	"errors"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
)

// Name is the pin directory, the parent key of the section, and the CLI noun.
const Name = "handoff"

// FeatureName is the feature's name.
const FeatureName = "keeper"

// limitsABI is the version of the pinned form: Limits as JSON in a meta.
const limitsABI = 1

// store has one instance: the limits applied by weir apply, for weir serve.
var store = instances.Store[Limits]{Feature: Name, ABI: limitsABI, Is: func(name string) bool { return name == pinnedLimits.Name }}

var pinnedLimits = kernel.Instance{Scope: kernel.HostScope, Feature: Name, Name: "keeper"}

// Feature is the keeper's configuration: its limits. The keeper itself is a part of weir serve and has no pins.
type Feature struct{}

var (
	_ feature.Feature[Limits, State] = Feature{}
	_ feature.Examiner               = Feature{}
)

// State is the pinned configuration.
type State struct {
	*Limits                         // nil: none applied
	Unreadable instances.Unreadable `json:"unreadable,omitempty"`
}

// Unread implements feature.Unreads.
func (st State) Unread() instances.Unreadable { return st.Unreadable }

// Name implements feature.Feature.
func (Feature) Name() string { return FeatureName }

// Needs implements feature.Feature.
func (Feature) Needs(Limits) []kernel.Need {
	return []kernel.Need{
		{Name: "pidfd_open", Since: "5.3", For: "detecting the exit of members", Probe: probePidfd},
		{Name: "SO_PEERPIDFD", Since: "6.5", Optional: true, For: "identifying members; without it by their PID when they connect", Probe: probePeerPidfd},
	}
}

// Empty implements feature.Emptier.
func (st State) Empty() bool { return st.Limits == nil && len(st.Unreadable) == 0 }

// Err is an error about unreadable limits, nil if they are readable. Damage is left to the host's faults.
func (st State) Err() error { return st.Unreadable.WithoutDamage().Err() }

// State implements feature.Feature.
func (Feature) State(_ context.Context, r *kernel.Root) (st State, err error) {
	all, unreadable, err := store.All(r)
	st.Unreadable = unreadable
	for _, rec := range all {
		st.Limits = &rec.Spec
	}
	return st, err
}

// Examine implements feature.Examiner.
func (f Feature) Examine(ctx context.Context, r *kernel.Root) ([]feature.Finding, error) {
	st, err := f.State(ctx, r)
	return feature.UnreadFindings(st.Unreadable), err
}

// Plan implements feature.Feature.
func (Feature) Plan(_ context.Context, st State, want Limits) (feature.Plan, error) {
	var p feature.Plan
	if p.Stays(st.Unreadable); len(st.Unreadable) > 0 {
		return p, nil
	}
	have := st.Limits
	none := want.same(Limits{})
	switch {
	case none && have != nil:
		p.Add(feature.Step{Verb: "remove", Object: "limits of the session keeper", Detail: Limits{}.String() + " apply again",
			Do: func(_ context.Context, l *kernel.WriteLock) (string, error) { return "", store.Remove(l, pinnedLimits) }})
	case !none && (have == nil || !have.same(want)):
		verb := "change"
		if have == nil {
			verb = "create"
		}
		p.Add(feature.Step{Verb: verb, Object: "limits of the session keeper", Detail: want.String(),
			Do: func(_ context.Context, l *kernel.WriteLock) (string, error) { return "", want.publish(l) }})
	}
	for _, r := range want.Allow.noUser() {
		p.Warn("handoff.keeper.allow: %s: /etc/passwd has no such user, so the rule matches nobody: add the user, or use its number with uid", r)
	}
	var before Limits
	if have != nil {
		before = *have
	}
	if a, b := before.withDefaults().Hold, want.withDefaults().Hold; b < a && len(p.Steps) > 0 {
		p.Warn("handoff.keeper.hold %v → %v: sessions with a longer wait for a member are reset at once", a, b)
	}
	if a, b := before.withDefaults().State, want.withDefaults().State; b < a && len(p.Steps) > 0 {
		p.Warn("handoff.keeper.max_state %v → %v: new states above it are rejected; existing larger ones stay", a, b)
	}
	return p, nil
}

func (l Limits) publish(lock *kernel.WriteLock) error {
	return store.Publish(lock, pinnedLimits, instances.Form[Limits]{Spec: l})
}

// Remove implements feature.Feature.
func (Feature) Remove(_ context.Context, l *kernel.WriteLock) error {
	return store.Remove(l, pinnedLimits)
}

// follow applies changes of the pinned limits to a keeper, until ctx is done.
func (k *Keeper) follow(ctx context.Context, r *kernel.Root, log feature.Logger) error {
	var said feature.Reported[string]
	last := (Limits{}).withDefaults()
	for range (feature.Loop{Every: time.Second, Root: r}).Turns(ctx) {
		st, err := Feature{}.State(ctx, r)
		err = errors.Join(err, st.Unreadable.Err())
		if l := st.Limits; err == nil {
			now := Limits{}.withDefaults()
			if l != nil {
				now = l.withDefaults()
			}
			if !now.same(last) {
				k.Limit(now)
				log.Info("limits of the session keeper", "limits", now.String())
				last = now
			}
		} else if said.Changed(FeatureName, err.Error()) {
			log.Warn("session keeper limits unreadable, keeping the previous ones", "err", err)
		}
	}
	return nil
}

func probePidfd() error {
	fd, err := unix.PidfdOpen(unix.Getpid(), 0)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

func probePeerPidfd() error {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fds[0])
	defer unix.Close(fds[1])
	fd, err := unix.GetsockoptInt(fds[0], unix.SOL_SOCKET, unix.SO_PEERPIDFD)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}
