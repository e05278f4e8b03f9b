// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/kernel"
)

// Name is the pin directory, the key above the section and the CLI noun.
const Name = "handoff"

// FeatureName is the feature's name.
const FeatureName = "keeper"

// limitsABI is the version of what is pinned: JSON of Limits in a meta.
const limitsABI = 1

// pinnedLimits is where weir apply leaves the limits for weir serve.
var pinnedLimits = kernel.Instance{Scope: kernel.HostScope, Feature: Name, Name: "keeper"}

// Feature is the keeper as host sees it: its limits. The keeper itself is a part of
// weir serve, and has no pins.
type Feature struct{}

var _ feature.Feature[Limits, *Limits] = Feature{}

// Name implements feature.Feature.
func (Feature) Name() string { return FeatureName }

// Needs implements feature.Feature.
func (Feature) Needs(Limits) []kernel.Need {
	return []kernel.Need{
		{Name: "pidfd_open", Since: "5.3", For: "knowing that a member has exited", Probe: probePidfd},
		{Name: "SO_PEERPIDFD", Since: "6.5", Optional: true, For: "without it a member is known by its number when it connects", Probe: probePeerPidfd},
	}
}

// State implements feature.Feature: the limits that were applied, nil for none.
func (Feature) State(_ context.Context, r *kernel.Root) (*Limits, error) {
	m, err := r.Meta(pinnedLimits)
	if errors.Is(err, kernel.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	if m.ABI != limitsABI {
		return nil, fmt.Errorf("%w: the limits of the session keeper are of ABI %d, this weir knows %d: use the weir that applied them", kernel.ErrABI, m.ABI, limitsABI)
	}
	l := &Limits{}
	if err := json.Unmarshal(m.Config, l); err != nil {
		return nil, fmt.Errorf("the limits of the session keeper: %w", err)
	}
	return l, nil
}

// Plan implements feature.Feature.
func (Feature) Plan(_ context.Context, have *Limits, want Limits) (feature.Plan, error) {
	var p feature.Plan
	none := want.withDefaults() == Limits{}.withDefaults()
	switch {
	case none && have != nil:
		p.Add(feature.Step{Verb: "remove", Object: "limits of the session keeper", Detail: Limits{}.String() + " hold again",
			Do: func(_ context.Context, l *kernel.WriteLock) (string, error) { return "", l.Remove(pinnedLimits) }})
	case !none && (have == nil || have.withDefaults() != want.withDefaults()):
		verb := "change"
		if have == nil {
			verb = "create"
		}
		p.Add(feature.Step{Verb: verb, Object: "limits of the session keeper", Detail: want.String(),
			Do: func(_ context.Context, l *kernel.WriteLock) (string, error) { return "", want.publish(l) }})
	}
	var before Limits
	if have != nil {
		before = *have
	}
	if a, b := before.withDefaults().Hold, want.withDefaults().Hold; b < a && len(p.Steps) > 0 {
		p.Warn("handoff.keeper.hold %v → %v: sessions that have waited longer than that for a member are reset at once", a, b)
	}
	return p, nil
}

func (l Limits) publish(lock *kernel.WriteLock) error {
	text, err := json.Marshal(l)
	if err != nil {
		return err
	}
	return lock.Publish(pinnedLimits, kernel.Meta{ABI: limitsABI, Created: time.Now(), Version: kernel.Version, Config: text}, kernel.Pins{})
}

// Remove implements feature.Feature.
func (Feature) Remove(_ context.Context, l *kernel.WriteLock) error {
	if err := l.Remove(pinnedLimits); !errors.Is(err, kernel.ErrNotExist) {
		return err
	}
	return nil
}

// Follow has a keeper go by the limits that are applied, until ctx is done: within a
// second of a change.
func (k *Keeper) Follow(ctx context.Context, r *kernel.Root, log feature.Logger) error {
	t := time.NewTicker(time.Second)
	defer t.Stop()
	var said string
	for last := (Limits{}).withDefaults(); ; {
		l, err := Feature{}.State(ctx, r)
		if err == nil {
			now := Limits{}.withDefaults()
			if l != nil {
				now = l.withDefaults()
			}
			if now != last {
				k.Limit(now)
				log.Info("limits of the session keeper", "are", now.String())
				last = now
			}
		} else if text := err.Error(); text != said {
			log.Warn("the limits of the session keeper stay as they were", "reason", err)
			said = text
		}
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		}
	}
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
