// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"errors"
	"fmt"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
)

var _ feature.Upgrader = Feature{}

// Outdated is an engine whose program another weir put in place.
type Outdated struct {
	Netns   string      `json:"netns"` // as the kernel names it: net:[4026531840]
	Engine  spec.Engine `json:"engine"`
	Object  string      `json:"object"`  // the beginning of the SHA-256 of the BPF object
	Version string      `json:"version"` // of the weir that put it there
	scope   string
}

// String is the change that an upgrade makes.
func (o Outdated) String() string {
	s := fmt.Sprintf("object %s → %s", o.Object, engine.ShortHash(engine.ObjectHash(o.Engine)))
	if o.Version != record.Version {
		s += fmt.Sprintf(", weir %s → %s", o.Version, record.Version)
	}
	return s
}

// outdated lists the engines among instances that an upgrade would change.
func outdated(r *kernel.Root, all []kernel.Instance) ([]Outdated, error) {
	var out []Outdated
	for _, i := range all {
		kind, ok := record.EngineKind(i)
		if !ok {
			continue
		}
		m, err := r.Meta(i)
		if errors.Is(err, kernel.ErrNotExist) {
			continue
		} else if err != nil {
			return nil, err
		}
		if err := m.RequireABI(i, record.ABI); err != nil {
			return nil, err
		}
		if m.Object != engine.ObjectHash(kind) {
			out = append(out, Outdated{Netns: fmt.Sprintf("net:[%s]", i.Scope), Engine: kind,
				Object: engine.ShortHash(m.Object), Version: m.Version, scope: i.Scope})
		}
	}
	return out, nil
}

// PlanUpgrade implements feature.Upgrader.
func (Feature) PlanUpgrade(_ context.Context, r *kernel.Root) (feature.Plan, error) {
	var plan feature.Plan
	all, err := r.Instances(spec.Name)
	if err != nil {
		return plan, err
	}
	list, err := outdated(r, all)
	for _, o := range list {
		plan.Add(upgradeStep(o))
	}
	return plan, err
}

func upgradeStep(o Outdated) feature.Step {
	return feature.Step{Verb: "upgrade", Object: fmt.Sprintf("engine %s of %s", o.Engine, o.Netns), Detail: o.String(),
		Do: func(_ context.Context, l *kernel.WriteLock) (string, error) { return "", upgrade(l, o.scope, o.Engine) }}
}

// upgrade puts this weir's program in place of another's, and brings the maps
// into this weir's layout. Every packet meets one of the two programs, with maps
// that say the same. Killed at any step, the next command finishes.
func upgrade(l *kernel.WriteLock, scope string, kind spec.Engine) error {
	if err := engine.UpgradeEngine(l, scope, kind); err != nil {
		return err
	}
	e, err := engine.OpenEngine(l, scope, kind) // which finishes it
	if err != nil {
		return err
	}
	e.Close()
	return nil
}
