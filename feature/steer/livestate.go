// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/state"
)

// warnAbout tells what operators changed about a service that stays.
func warnAbout(s *state.Service, plan *feature.Plan, t target) {
	p := *s.Record
	p.Overrides, p.Service = s.Record.Overrides.Clone(), t.service
	p.DropGone()
	if p.Bypassed {
		plan.Warn("service %s is bypassed: the kernel alone chooses, until weir bypass --off %s", s.Name, s.Name)
	}
	for _, slot := range p.Drained {
		plan.Warn("slot %d of service %s is drained, until weir steer undrain %s --slot %d", slot, s.Name, s.Name, slot)
	}
	if n := len(p.Moved) + len(p.Placed); n > 0 {
		plan.Warn("%d devices and %d buckets of service %s stay where weir steer move put them: weir steer status lists them", len(p.Moved), len(p.Placed), s.Name)
	}
	if gone := len(s.Record.Moved) - len(p.Moved) + len(s.Record.Placed) - len(p.Placed); gone > 0 {
		plan.Warn("%d moves of service %s are forgotten, for their slots are gone", gone, s.Name)
	}
}
