// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/kernel"
)

// UpgradePlan plans the replacement of other versions' programs. It changes nothing.
func (h *Host) UpgradePlan(ctx context.Context) (feature.Plan, error) {
	var all feature.Plan
	for _, f := range features {
		if u, ok := f.Value.(feature.Upgrader); ok {
			p, err := u.PlanUpgrade(ctx, h.Root)
			if err != nil {
				return feature.Plan{}, err
			}
			all.Join(p)
		}
	}
	return all, nil
}

// Upgrade replaces other versions' programs under traffic, after recovering from a killed command. It calls each after
// every step. A failed step does not stop the others.
func (h *Host) Upgrade(ctx context.Context, each func(Done)) error {
	l, err := h.Root.Lock(ctx)
	if err != nil {
		return err
	}
	defer l.Unlock()
	errs := []error{recoverAll(l, nil)}
	plan, err := h.UpgradePlan(ctx)
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	errs = append(errs, plan.Unread.Err())
	for _, s := range plan.Steps {
		note, err := s.Do(ctx, l)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", s, err))
			continue
		}
		each(Done{s, note})
	}
	return errors.Join(errs...)
}

// recoverAll finishes changes of killed commands, upgrades included, for the features in only, or for all if it is
// empty.
func recoverAll(l *kernel.WriteLock, only []string) error {
	var errs []error
	for _, f := range featuresOnly(only) {
		if m, ok := f.Value.(feature.Recoverer); ok {
			errs = append(errs, m.Recover(l))
		}
	}
	return errors.Join(errs...)
}
