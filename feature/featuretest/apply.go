// SPDX-License-Identifier: Apache-2.0

package featuretest

import (
	"context"
	"errors"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/kernel"
)

// Apply makes a feature match c, like weir apply: it validates c, recovers after a killed writer, reads, plans and
// applies. It returns the steps of the plan.
func Apply[C, S any](ctx context.Context, r *kernel.Root, f feature.Feature[C, S], c C) (steps []string, err error) {
	if v, ok := any(&c).(interface{ Validate() []error }); ok {
		if errs := v.Validate(); len(errs) > 0 {
			return nil, errors.Join(errs...)
		}
	}
	var recovers func(*kernel.WriteLock) error
	if m, ok := f.(feature.Recoverer); ok {
		recovers = m.Recover
	}
	return ApplyPlan(ctx, r, recovers, func() (feature.Plan, error) {
		have, err := f.State(ctx, r)
		if err != nil {
			return feature.Plan{}, err
		}
		return f.Plan(ctx, have, c)
	})
}

// Upgrade replaces another version's programs, like weir upgrade. It returns the steps of the plan.
func Upgrade(ctx context.Context, r *kernel.Root, f feature.Upgrader) (steps []string, err error) {
	return ApplyPlan(ctx, r, nil, func() (feature.Plan, error) { return f.PlanUpgrade(ctx, r) })
}

// Restore restores a feature from the output of Save, like weir rollback.
func Restore(ctx context.Context, r *kernel.Root, f feature.Restorer, saved []byte) (feature.Plan, error) {
	var p feature.Plan
	_, err := ApplyPlan(ctx, r, nil, func() (_ feature.Plan, err error) {
		p, err = f.PlanRestore(ctx, r, saved)
		return p, err
	})
	return p, err
}

// ApplyPlan is Apply for a part of a feature. plan runs under the lock, after recovers if not nil.
func ApplyPlan(ctx context.Context, r *kernel.Root, recovers func(*kernel.WriteLock) error, plan func() (feature.Plan, error)) (steps []string, err error) {
	l, err := r.Lock(ctx)
	if err != nil {
		return nil, err
	}
	defer l.Unlock()
	if recovers != nil {
		if err := recovers(l); err != nil {
			return nil, err
		}
	}
	p, err := plan()
	if err != nil {
		return nil, err
	}
	for _, s := range p.Steps {
		steps = append(steps, s.String())
	}
	return steps, p.Apply(ctx, l, nil)
}
