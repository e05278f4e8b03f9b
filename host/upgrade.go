// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/kernel"
)

// UpgradePlan says which programs of another weir this one would replace. It
// changes nothing.
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

// Upgrade puts this weir's programs in place of another's, under traffic, after
// recovering what a killed command may have left. It calls each after every step. A
// step that fails keeps no other from being tried.
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

// recoverAll finishes what killed commands left, an upgrade among them; only: of these features, if there are any.
func recoverAll(l *kernel.WriteLock, only []string) error {
	var errs []error
	for _, f := range featuresOnly(only) {
		if m, ok := f.Value.(feature.Recoverer); ok {
			errs = append(errs, m.Recover(l))
		}
	}
	return errors.Join(errs...)
}
