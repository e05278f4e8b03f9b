// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"slices"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/kernel"
)

// undoable adds to a feature's plan how it is taken back, unless the plan knows by itself: the feature is saved before the
// first step, and put back to that.
func undoable(f any, plan feature.Plan) feature.Plan {
	r, ok := f.(feature.Restorer)
	if !ok || len(plan.Undo) > 0 || len(plan.Steps) == 0 {
		return plan
	}
	var saved []byte
	plan.Steps = slices.Clone(plan.Steps)
	for i, s := range plan.Steps {
		plan.Steps[i].Do = func(ctx context.Context, l *kernel.WriteLock) (note string, err error) {
			if saved == nil {
				saved, err = r.Save(ctx, l.Root)
			}
			if err != nil {
				return "", err
			}
			return s.Do(ctx, l)
		}
	}
	plan.Undo = append(plan.Undo, func(ctx context.Context, l *kernel.WriteLock) error {
		if saved == nil {
			return nil // no step of it has begun
		}
		return putBack(ctx, l, f, r, saved)
	})
	return plan
}

// putBack makes a feature as it was saved, after whatever a failed step left. A step of the way back that fails keeps no
// other from being tried.
func putBack(ctx context.Context, l *kernel.WriteLock, f any, r feature.Restorer, saved []byte) error {
	var errs []error
	if m, ok := f.(feature.Mender); ok {
		errs = append(errs, m.Mend(l))
	}
	plan, err := r.PlanRestore(ctx, l.Root, saved)
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	for _, s := range plan.Steps {
		if _, err := s.Do(ctx, l); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
