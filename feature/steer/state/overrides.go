// SPDX-License-Identifier: Apache-2.0

package state

import (
	"context"
	"fmt"

	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
)

// addLive shows what was changed about a service while it ran.
func (s *Service) addLive(r *kernel.Root) (err error) {
	p := s.Record
	s.Weights, s.Drained, s.Bypassed, s.DevicesFile = p.Service.Weights, p.Drained, p.Bypassed, p.Service.Devices
	s.DeviceList, err = record.ReadDevices(r, p, s.PinScope)
	if err != nil {
		return err
	}
	for a, slot := range p.Moved {
		if s.Moved == nil {
			s.Moved = map[string]int{}
		}
		name := a.String()
		if d := s.DeviceList.Find(a); d != nil {
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

// CountMisplaced fills in MisplacedSessions. It needs root, and leaves the field
// nil where sessions cannot be seen: it is not part of [Read], which is
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
		st.Services[i].Others = st.Beside(&st.Services[i])
	}
}

// Beside are the endpoints of the services in a service's namespace, without its own.
func (st State) Beside(s *Service) (others [][]service.Endpoint) {
	for _, o := range st.Services {
		if o.Name != s.Name && o.PinScope == s.PinScope && !o.Bypassed {
			others = append(others, o.Endpoints)
		}
	}
	return others
}

// ResetRate is the service's own; 0 where misplaced sessions are to be left.
func (s *Service) ResetRate() spec.Rate {
	if s.Record == nil || s.Record.Service.ResetRate == nil {
		return 0
	}
	return *s.Record.Service.ResetRate
}

// ExamineOverrides looks for what somebody may have forgotten to take back.
func (s *Service) ExamineOverrides(ctx context.Context, add func(text, remedy string)) {
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
