// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

var _ feature.Restorer = Feature{}

// Save implements feature.Restorer: the guards as they are pinned. What their sources have earned stays with the pins.
func (Feature) Save(_ context.Context, r *kernel.Root) ([]byte, error) {
	all, err := r.Instances(Name)
	if err != nil {
		return nil, err
	}
	var saved []published
	for _, i := range all {
		if i.Name == hooksName {
			continue
		}
		p, err := readOne(r, i)
		if errors.Is(err, kernel.ErrNotExist) {
			continue // damaged, and made anew by the plan
		} else if err != nil {
			return nil, err
		}
		saved = append(saved, p)
	}
	return json.Marshal(saved)
}

// PlanRestore implements feature.Restorer.
func (f Feature) PlanRestore(ctx context.Context, r *kernel.Root, saved []byte) (feature.Plan, error) {
	var plan feature.Plan
	var was []published
	if err := json.Unmarshal(saved, &was); err != nil {
		return plan, fmt.Errorf("the saved guards: %w", err)
	}
	have, err := f.State(ctx, r)
	if err != nil {
		return plan, err
	}
	var want Config
	for _, p := range was {
		ref, err := netns.Reference(p.Netns, p.ID)
		if errors.Is(err, netns.ErrGone) {
			plan.Warn("guard of service %s: its network namespace (%s) is gone", p.Service.Name, p.Netns)
			continue
		} else if err != nil {
			return plan, err
		}
		if ns, _, err := p.Service.FindNetns(ctx); err != nil {
			p.Service.Netns = ref
		} else {
			if ns.Inode() != p.Inode {
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
