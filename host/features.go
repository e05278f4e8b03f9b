// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/filter"
	"github.com/weir-project/weir/feature/guard"
	"github.com/weir-project/weir/feature/handoff/front"
	"github.com/weir-project/weir/feature/handoff/keeper"
	"github.com/weir-project/weir/feature/handoff/server"
	"github.com/weir-project/weir/feature/reroute"
	"github.com/weir-project/weir/feature/steer"
	"github.com/weir-project/weir/kernel"
)

// parts are all of weir's features. One more is one more line here, its section in
// [Config], and its state in [Status]; what it can do beside the common (run, mend,
// upgrade, examine, measure) is found by type assertion.
var parts = []part{
	partOf(steer.Feature{}, (*Config).steer),
	partOf(guard.Feature{}, (*Config).guard),
	partOf(filter.Feature{}, (*Config).filter),
	partOf[keeper.Limits, *keeper.Limits](sessions{}, (*Config).handoff),
	partOf(reroute.Feature{}, (*Config).reroute),
}

// sessions is handoff: the keeper, and what agents of front ends and of servers have pinned: weir apply knows nothing of
// that, and weir remove takes it, too.
type sessions struct{ keeper.Feature }

func (f sessions) Remove(ctx context.Context, l *kernel.WriteLock) error {
	return errors.Join(front.RemoveAll(l), server.RemoveGates(l), f.Feature.Remove(ctx, l))
}

// part is a feature as the host sees it, whatever its configuration and state are.
type part struct {
	feature  any
	name     string
	uses     func(c *Config) bool // the file says something of it
	validate func(c *Config) []error
	needs    func(c *Config) []kernel.Need
	plan     func(ctx context.Context, r *kernel.Root, c *Config) (feature.Plan, error)
	read     func(ctx context.Context, r *kernel.Root) error // whether its pins can be read
	remove   func(ctx context.Context, l *kernel.WriteLock) error
}

// section gives a feature its part of the configuration; ok says whether there is one.
type section[C any] func(*Config) (c C, ok bool)

func partOf[C, S any](f feature.Feature[C, S], of section[C]) part {
	return part{feature: f, name: f.Name(), remove: f.Remove,
		uses: func(c *Config) bool { _, ok := of(c); return ok },
		validate: func(c *Config) []error {
			s, _ := of(c)
			if v, ok := any(&s).(interface{ Validate() []error }); ok {
				return v.Validate()
			}
			return nil
		},
		needs: func(c *Config) []kernel.Need { s, _ := of(c); return f.Needs(s) },
		plan: func(ctx context.Context, r *kernel.Root, c *Config) (feature.Plan, error) {
			have, err := f.State(ctx, r)
			if err != nil {
				return feature.Plan{}, err
			}
			want, _ := of(c)
			plan, err := f.Plan(ctx, have, want)
			return undoable(f, plan), err
		},
		read: func(ctx context.Context, r *kernel.Root) error { _, err := f.State(ctx, r); return err },
	}
}

// partsNamed are the features that a command is about: all of them if name is empty.
func partsNamed(name string) ([]part, error) {
	for i, p := range parts {
		if p.name == name {
			return parts[i : i+1], nil
		}
	}
	if name == "" {
		return parts, nil
	}
	return nil, fmt.Errorf("no feature %q: there is %s", name, strings.Join(Features(), ", "))
}

// Features are the names of weir's features.
func Features() []string {
	var out []string
	for _, p := range parts {
		out = append(out, p.name)
	}
	return out
}

// SetVersion has the features record this version of weir in what they pin.
func SetVersion(v string) {
	steer.Version, guard.Version, filter.Version, keeper.Version = v, v, v, v
	reroute.SetVersion(v)
}
