// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"errors"
	"slices"

	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// Foreseen are the sessions of one service that a change would reset.
type Foreseen struct {
	Service  string    `json:"service"`
	Sessions []Session `json:"sessions"`
	Problem  string    `json:"problem,omitempty"` // why they cannot be foreseen
}

// ForeseeApply says which sessions applying a configuration would misplace, or
// finds misplaced, for every service that it creates or changes.
func ForeseeApply(ctx context.Context, have State, want spec.Config) ([]Foreseen, error) {
	var out []Foreseen
	for _, s := range want.Services {
		ns, _, err := s.FindNetns(ctx)
		if err != nil {
			return nil, err
		}
		t := newTarget(s, ns)
		err = t.loadDevices()
		if err == nil {
			var f *Foreseen
			if f, err = t.foresee(ctx, have, ns); f != nil {
				out = append(out, *f)
			}
		}
		ns.Close()
		if err != nil {
			return nil, err
		}
	}
	return out, nil
}

// foresee compares with what is published; nil if nothing of a service would
// change.
func (t target) foresee(ctx context.Context, have State, ns *netns.Handle) (*Foreseen, error) {
	p := &record.Service{Service: t.service, Netns: t.netns}
	p.SetDevices(t.devices)
	after := &ServiceState{root: have.root, Name: t.service.Name, scope: t.scope, Netns: t.netns, Inode: ns.Inode(), pub: p,
		eps: p.Service.Endpoints(), By: p.Service.By, OnEmpty: p.Service.OnEmpty, devices: t.devices}
	after.others = have.beside(after)
	f := &Foreseen{Service: t.service.Name, Sessions: []Session{}}
	i := slices.IndexFunc(have.Services, func(s ServiceState) bool { return s.Name == t.service.Name && s.scope == t.scope })
	var before *ServiceState
	if i >= 0 {
		before = &have.Services[i]
		p.Shape(before.pub)
		if p.Service.Seed == nil {
			p.Service.Seed = before.pub.Service.Seed
		}
		after.Bypassed = before.Bypassed
	} else {
		p.Shape(nil)
		if p.Service.Seed == nil {
			if held, err := after.established(); err == nil && len(held) == 0 {
				return nil, nil // wherever devices will belong
			}
			f.Problem = "its seed is drawn when it is created, so nobody can say yet where a device will belong: give it a seed"
			return f, nil
		}
	}
	changes := after.foreseeSlots(ctx, before, ns)
	after.Seed, after.table = *p.Service.Seed, p.Table
	if before != nil && !changes && !p.Misplaces(before.pub) {
		return nil, nil
	}
	var err error
	f.Sessions, err = after.Misplaced(ctx)
	return f, err
}

// foreseeSlots fills in who would have the slots; changes says whether a member
// would come.
func (s *ServiceState) foreseeSlots(ctx context.Context, before *ServiceState, ns *netns.Handle) (changes bool) {
	for n := range s.pub.Service.Slots {
		slot := slots.State{Slot: n, State: "empty"}
		if before != nil && n < len(before.Slots) {
			slot = before.Slots[n]
		}
		m := s.pub.Service.Member(n)
		if m != nil && !(slot.Admitted() && slot.Member == m.String()) {
			if a, err := m.Adopt(ctx, ns, s.pub.Service.Spec); err == nil {
				slot = slots.State{Slot: n, State: "admitted", PID: a.PIDs()[0], Member: m.String()}
				a.Close()
				changes = true
			}
		}
		s.Slots = append(s.Slots, slot)
	}
	return changes
}

// ForeseeMove says which sessions a move would have reset.
func ForeseeMove(ctx context.Context, r *kernel.Root, s *ServiceState, m record.Moving) (Foreseen, error) {
	return s.foreseeChange(ctx, r, m.Apply)
}

// ForeseeDrain says which sessions draining a slot, or taking that back, would
// have reset.
func ForeseeDrain(ctx context.Context, r *kernel.Root, s *ServiceState, slot int, back bool) (Foreseen, error) {
	return s.foreseeChange(ctx, r, func(p *record.Service) error {
		if back {
			return p.Undrain(slot)
		}
		return p.Drain(slot)
	})
}

func (s *ServiceState) foreseeChange(ctx context.Context, r *kernel.Root, f func(p *record.Service) error) (Foreseen, error) {
	out := Foreseen{Service: s.Name}
	if s.pub == nil {
		return out, errors.New("a state that was not read from pins")
	}
	p, err := record.Changed(r, s.scope, s.pub, f)
	if err != nil {
		return out, err
	}
	after := *s
	after.pub, after.table, after.devices = p, p.Table, p.List
	out.Sessions, err = after.Misplaced(ctx)
	return out, err
}
