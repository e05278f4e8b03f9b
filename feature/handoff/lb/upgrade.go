// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"context"
	"strings"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/handoff/lb/attachment"
	"github.com/weir-project/weir/feature/handoff/lb/spec"
	"github.com/weir-project/weir/kernel"
)

// PlanUpgrade implements feature.Upgrader.
func (Feature) PlanUpgrade(_ context.Context, r *kernel.Root) (plan feature.Plan, err error) {
	all, unreadable, err := store.All(r)
	plan.Stays(unreadable)
	for _, rec := range all {
		if store.Outdated(rec) {
			plan.Add(feature.Step{Verb: "upgrade", Object: "load balancer " + strings.TrimPrefix(rec.Name, spec.PinPrefix) + " of namespace " + rec.Scope,
				Detail: "programs of another weir", Do: func(_ context.Context, l *kernel.WriteLock) (string, error) { return "", upgrade(l, rec.Instance) }})
		}
	}
	return plan, err
}

// upgrade replaces another version's programs by this version's, over the same maps. A running agent continues. The metadata
// changes last. If the upgrade is killed earlier, the next one starts over. Until then each packet meets one of the two programs.
func upgrade(l *kernel.WriteLock, inst kernel.Instance) error {
	u, err := store.Open(l, inst)
	if err != nil {
		return err
	}
	defer u.Close()
	o := u.Spec.filled()
	var filters []kernel.Clsact
	if err := u.Netns.Do(func() (err error) {
		filters, err = attachment.Exchange(u.Pins, o.devices(), o.BufferDevice)
		return err
	}); err != nil {
		return err
	}
	if len(filters) > 0 {
		l.NoteFilters(u.Instance, filters)
	}
	return store.Upgrade(l, inst, func() error { return nil }, nil)
}
