// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/netns"
)

// PlanAll plans the liveness of the whole host: the sessions of wants in their namespaces, and none elsewhere. Timer
// loops opened for other packages (OpenLoops) keep running.
func PlanAll(ctx context.Context, have State, wants []Config) (plan feature.Plan, err error) {
	plan.Stays(have.Unreadable)
	wanted := map[string]bool{}
	for _, w := range wants {
		ns, err := netns.Open(w.Netns)
		if err != nil {
			return plan, fmt.Errorf("reroute: %w", err)
		}
		scope := netnsScope(ns)
		ns.Close()
		wanted[scope] = true
		if w.Tick == 0 {
			w.Tick = have.published[scope].Config.Tick
		}
		p, err := Plan(ctx, have, w)
		if err != nil {
			return plan, err
		}
		plan.Join(p)
	}
	for _, scope := range slices.Sorted(maps.Keys(have.published)) {
		if c := have.published[scope].Config; !wanted[scope] && (c.Tick == 0 || len(c.Sessions) > 0) {
			plan.Add(removeStep(scope))
		}
	}
	return plan, nil
}
