// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"fmt"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
)

// addLive shows what was changed about a service while it ran.
func (s *ServiceState) addLive(r *kernel.Root) (err error) {
	p := s.pub
	s.Weights, s.Drained, s.Bypassed, s.DevicesFile = p.Service.Weights, p.Drained, p.Bypassed, p.Service.Devices
	s.devices, err = record.ReadDevices(r, p, s.scope)
	if err != nil {
		return err
	}
	for a, slot := range p.Moved {
		if s.Moved == nil {
			s.Moved = map[string]int{}
		}
		name := a.String()
		if d := s.devices.Find(a); d != nil {
			name = d.Name
		}
		s.Moved[name] = slot
	}
	for b, to := range p.Placed {
		if s.Placed == nil {
			s.Placed = map[int]int{}
		}
		s.Placed[b] = to.To
	}
	return nil
}

// warn tells what operators changed about a service that stays.
func (s *ServiceState) warn(plan *feature.Plan, t target) {
	p := *s.pub
	p.Overrides, p.Service = s.pub.Overrides.Clone(), t.service
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
	if gone := len(s.pub.Moved) - len(p.Moved) + len(s.pub.Placed) - len(p.Placed); gone > 0 {
		plan.Warn("%d moves of service %s are forgotten, for their slots are gone", gone, s.Name)
	}
}

// CountMisplaced fills in MisplacedSessions. It needs root, and leaves the field
// nil where sessions cannot be seen: it is not part of [ReadState], which is
// asked often, because it looks into every member's descriptors.
func (st State) CountMisplaced(ctx context.Context) {
	for i := range st.Services {
		if found, err := st.Services[i].Misplaced(ctx); err == nil {
			n := len(found)
			st.Services[i].MisplacedSessions = &n
		}
	}
}

// noteOthers tells each service of the endpoints of those beside it.
func (st State) noteOthers() {
	for i := range st.Services {
		st.Services[i].others = st.beside(&st.Services[i])
	}
}

// beside are the endpoints of the services in a service's namespace, without its own.
func (st State) beside(s *ServiceState) (others [][]service.Endpoint) {
	for _, o := range st.Services {
		if o.Name != s.Name && o.scope == s.scope && !o.Bypassed {
			others = append(others, o.eps)
		}
	}
	return others
}

// ResetRate is the service's own; 0 where misplaced sessions are to be left.
func (s *ServiceState) ResetRate() spec.Rate {
	if s.pub == nil || s.pub.Service.ResetRate == nil {
		return 0
	}
	return *s.pub.Service.ResetRate
}

// examineLive looks for what somebody may have forgotten to take back.
func (s *ServiceState) examineLive(ctx context.Context, add func(text, remedy string)) {
	if s.Bypassed {
		add("BYPASSED: the kernel alone chooses, nothing is steered", "weir bypass --off "+s.Name)
	}
	for _, slot := range s.Drained {
		add(fmt.Sprintf("slot %d is drained", slot), fmt.Sprintf("weir steer undrain %s --slot %d, once its member is to serve again", s.Name, slot))
	}
	if found, err := s.Misplaced(ctx); err == nil && len(found) > 0 {
		add(fmt.Sprintf("%d TCP sessions are at another slot than their router, whose datagrams go elsewhere", len(found)), "weir steer reset "+s.Name)
	}
}
