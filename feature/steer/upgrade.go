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
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/kernel"
)

var _ feature.Completer = Feature{}

// Complete implements feature.Completer. A service keeps its seed, its table and the operator overrides. An engine
// keeps its remaining maps.
func (Feature) Complete(l *kernel.WriteLock, i kernel.Instance, lacks []string) (note string, err error) {
	if kind, ok := record.EngineKind(i); ok {
		return engine.RecoverEngine(l, i, kind, lacks)
	}
	if kernel.ValidName(i.Name) {
		return recoverService(l, i)
	}
	return "created again", l.Remove(i) // derived from the services
}

// recoverService publishes a service again from its record.
func recoverService(l *kernel.WriteLock, i kernel.Instance) (note string, err error) {
	p, err := record.Read(l.Root, i)
	if errors.Is(err, kernel.ErrDamaged) {
		return "created again by the plan", engine.RemoveDamaged(l, i)
	} else if err != nil {
		return "", fmt.Errorf("recover %s: %w", i, err)
	}
	e, err := engine.OpenEngine(l, i.Scope, p.Engine)
	if errors.Is(err, kernel.ErrNotExist) {
		ns, nerr := l.OpenNetns(i)
		if nerr != nil {
			return "", nerr
		}
		defer ns.Close()
		if err = engine.PublishEngine(l, ns, p.Engine, 0); err == nil {
			e, err = engine.OpenEngine(l, i.Scope, p.Engine)
		}
	}
	if err != nil {
		return "", err
	}
	defer e.Close()
	if err := e.Mark(true); err != nil {
		return "", err
	}
	if err := e.PublishService(p); err != nil {
		return "", err
	}
	kernel.Step("steer:service recovered")
	return "", e.Reconcile()
}

var _ feature.Upgrader = Feature{}

// PlanUpgrade implements feature.Upgrader.
func (Feature) PlanUpgrade(_ context.Context, r *kernel.Root) (feature.Plan, error) {
	var plan feature.Plan
	all, err := r.Instances(spec.Name)
	if err != nil {
		return plan, err
	}
	list, unread := state.ReadOutdated(r, all)
	for _, o := range list {
		plan.Add(upgradeStep(o))
	}
	unreadServices, err := state.ReadUnread(r, all)
	plan.Stays(append(unread, unreadServices...))
	return plan, err
}

func upgradeStep(o state.Outdated) feature.Step {
	return feature.Step{Verb: "upgrade", Object: fmt.Sprintf("engine %s of %s", o.Engine, o.Netns), Detail: o.String(),
		Do: func(_ context.Context, l *kernel.WriteLock) (string, error) { return "", upgrade(l, o.Scope, o.Engine) }}
}

// upgrade replaces an engine's program by this version's, and converts the maps to its layout. Every packet meets one
// of the two programs, with equivalent maps. After a kill at any step, the next command finishes.
func upgrade(l *kernel.WriteLock, scope string, kind spec.Engine) error {
	if err := engine.UpgradeEngine(l, scope, kind); err != nil {
		return err
	}
	e, err := engine.OpenEngine(l, scope, kind) // finishes the upgrade
	if err != nil {
		return err
	}
	e.Close()
	return nil
}
