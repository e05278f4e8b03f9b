// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

var _ feature.Restorer = Feature{}

// Save implements feature.Restorer: the guards as pinned, without the state of their sources.
func (Feature) Save(_ context.Context, r *kernel.Root) ([]byte, error) {
	return guards.Save(r)
}

// PlanRestore implements feature.Restorer.
func (f Feature) PlanRestore(ctx context.Context, r *kernel.Root, saved []byte) (feature.Plan, error) {
	var plan feature.Plan
	was, err := guards.Saved(saved)
	if err != nil {
		return plan, err
	}
	have, err := f.State(ctx, r)
	if err != nil {
		return plan, err
	}
	var want Config
	for _, rec := range was {
		p := rec.Spec
		ref, err := netns.Reference(rec.Ref, rec.ID())
		if errors.Is(err, netns.ErrGone) {
			plan.Warn("guard of service %s: its network namespace (%s) is gone", p.Service.Name, p.Netns)
			continue
		} else if err != nil {
			return plan, err
		}
		if ns, _, err := p.Service.FindNetns(ctx); err != nil {
			p.Service.Netns = ref
		} else {
			if !ns.Is(rec.ID()) {
				p.Service.Netns = ref
			}
			ns.Close()
		}
		want.Services = append(want.Services, p.Service)
	}
	back, err := f.Plan(ctx, have, want)
	plan.Join(back)
	return plan, err
}
