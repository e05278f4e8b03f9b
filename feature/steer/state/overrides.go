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

// addLive adds the operator overrides of a service.
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

// CountMisplaced sets MisplacedSessions. It needs root. The field stays nil if sessions cannot be read. It reads the
// descriptors of every member, so it is not part of the frequent [Read].
func (st State) CountMisplaced(ctx context.Context) {
	for i := range st.Services {
		if found, err := st.Services[i].Misplaced(ctx); err == nil {
			n := len(found)
			st.Services[i].MisplacedSessions = &n
		}
	}
}

// noteOthers gives each service the endpoints of the other services in its namespace.
func (st State) noteOthers() {
	for i := range st.Services {
		st.Services[i].Others = st.Beside(&st.Services[i])
	}
}

// Beside returns the endpoints of the other services in a service's namespace.
func (st State) Beside(s *Service) (others [][]service.Endpoint) {
	for _, o := range st.Services {
		if o.Name != s.Name && o.PinScope == s.PinScope && !o.Bypassed {
			others = append(others, o.Endpoints)
		}
	}
	return others
}

// ResetRate returns the service's reset rate. 0 means that misplaced sessions are left alone.
func (s *Service) ResetRate() spec.Rate {
	if s.Record == nil || s.Record.Service.ResetRate == nil {
		return 0
	}
	return *s.Record.Service.ResetRate
}

// ExamineOverrides reports overrides that an operator may have forgotten.
func (s *Service) ExamineOverrides(ctx context.Context, add func(text, remedy string)) {
	if s.Bypassed {
		add("BYPASSED: the kernel alone chooses, nothing is steered", "weir bypass --off "+s.Name)
	}
	for _, slot := range s.Drained {
		add(fmt.Sprintf("slot %d is drained", slot), fmt.Sprintf("weir steer undrain %s --slot %d, when its member should serve again", s.Name, slot))
	}
	if found, err := s.Misplaced(ctx); err == nil && len(found) > 0 {
		add(fmt.Sprintf("%d TCP sessions are misplaced: their routers' datagrams go to another slot", len(found)), "weir steer reset "+s.Name)
	}
}
