// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"fmt"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/kernel"
)

var _ feature.Upgrader = Feature{}

// PlanUpgrade implements feature.Upgrader.
func (Feature) PlanUpgrade(_ context.Context, r *kernel.Root) (feature.Plan, error) {
	var plan feature.Plan
	all, err := r.Instances(spec.Name)
	if err != nil {
		return plan, err
	}
	list, err := state.ReadOutdated(r, all)
	for _, o := range list {
		plan.Add(upgradeStep(o))
	}
	return plan, err
}

func upgradeStep(o state.Outdated) feature.Step {
	return feature.Step{Verb: "upgrade", Object: fmt.Sprintf("engine %s of %s", o.Engine, o.Netns), Detail: o.String(),
		Do: func(_ context.Context, l *kernel.WriteLock) (string, error) { return "", upgrade(l, o.Scope, o.Engine) }}
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
