// SPDX-License-Identifier: Apache-2.0

package featuretest

import (
	"context"
	"errors"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/kernel"
)

// Apply makes a feature what c says, as weir apply does: it validates c, recovers what a killed
// writer left, reads, plans and carries out. It returns the plan's steps in words.
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

// Upgrade puts this weir's programs in place of another one's, as weir upgrade does. It returns the plan's steps in words.
func Upgrade(ctx context.Context, r *kernel.Root, f feature.Upgrader) (steps []string, err error) {
	return ApplyPlan(ctx, r, nil, func() (feature.Plan, error) { return f.PlanUpgrade(ctx, r) })
}

// Restore puts a feature back to what Save returned, as weir rollback does.
func Restore(ctx context.Context, r *kernel.Root, f feature.Restorer, saved []byte) (feature.Plan, error) {
	var p feature.Plan
	_, err := ApplyPlan(ctx, r, nil, func() (_ feature.Plan, err error) {
		p, err = f.PlanRestore(ctx, r, saved)
		return p, err
	})
	return p, err
}

// ApplyPlan is Apply for a part of a feature: plan runs under the lock, after recovers if there is any.
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
