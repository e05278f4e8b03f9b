// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"errors"
	"net/netip"
	"slices"

	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// Foreseen is the sessions of one service that a change would reset.
type Foreseen struct {
	Service  string          `json:"service"`
	Sessions []state.Session `json:"sessions"`
	Devices  []Moved         `json:"devices,omitempty"` // known devices whose datagrams and new connections would move
	Problem  string          `json:"problem,omitempty"` // reason if they cannot be foreseen
}

// Moved is a device that would move to another slot.
type Moved struct {
	Address netip.Addr `json:"address"`
	Name    string     `json:"name,omitempty"`
	From    int        `json:"from"` // slots
	To      int        `json:"to"`
}

// String names the device, as sessions do.
func (m Moved) String() string {
	if m.Name != "" {
		return m.Name
	}
	return m.Address.String()
}

// movedBetween returns the known devices, and the named ones, with another slot after a change.
func movedBetween(r *kernel.Root, before, after *state.Service, named ...string) ([]Moved, error) {
	if !before.By.KeepsDevices() {
		return nil, nil
	}
	all, _, err := before.Devices(r) // sessions are reported apart
	if err != nil {
		return nil, err
	}
	now, err := after.Mapping(state.WhatIf{})
	if err != nil {
		return nil, err
	}
	was, err := before.Mapping(state.WhatIf{})
	if err != nil {
		return nil, err
	}
	addrs, err := before.Sources(named)
	if err != nil {
		return nil, err
	}
	for _, a := range addrs { // possibly without a packet yet
		if !slices.ContainsFunc(all, func(d state.Device) bool { return d.Address == a }) {
			p := was.Assign(a)
			all = append(all, state.Device{Address: a, Name: p.Device, Slot: p.Slot})
		}
	}
	var out []Moved
	for _, d := range all {
		if to := now.Assign(d.Address).Slot; d.Slot >= 0 && to != d.Slot {
			out = append(out, Moved{d.Address, d.Name, d.Slot, to})
		}
	}
	return out, nil
}

// ForeseeApply returns the sessions that an apply would misplace or find misplaced, for every new or changed service.
func ForeseeApply(ctx context.Context, have state.State, want spec.Config) ([]Foreseen, error) {
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

// foresee compares with the published service. It returns nil if nothing would change.
func (t target) foresee(ctx context.Context, have state.State, ns *netns.Handle) (*Foreseen, error) {
	p := &record.Service{Service: t.service, Netns: t.netns}
	p.SetDevices(t.devices)
	after := &state.Service{Root: have.Root, Name: t.service.Name, PinScope: t.scope, Netns: t.netns, Inode: ns.Inode(), Record: p,
		Endpoints: p.Service.Endpoints(), By: p.Service.By, OnEmpty: p.Service.OnEmpty, DeviceList: t.devices}
	after.Others = have.Beside(after)
	f := &Foreseen{Service: t.service.Name, Sessions: []state.Session{}}
	i := slices.IndexFunc(have.Services, func(s state.Service) bool { return s.Name == t.service.Name && s.PinScope == t.scope })
	var before *state.Service
	if i >= 0 {
		before = &have.Services[i]
		p.Shape(before.Record)
		if p.Service.Seed == nil {
			p.Service.Seed = before.Record.Service.Seed
		}
		after.Bypassed = before.Bypassed
	} else {
		p.Shape(nil)
		if p.Service.Seed == nil {
			if held, err := after.Established(); err == nil && len(held) == 0 {
				return nil, nil // there are no sessions
			}
			f.Problem = "its seed is drawn at its creation, so devices' slots are unknown yet: set a seed"
			return f, nil
		}
	}
	changes := foreseeSlots(after, ctx, before, ns)
	after.Seed, after.Table = *p.Service.Seed, p.Table
	if before != nil && !changes && !p.Misplaces(before.Record) {
		return nil, nil
	}
	var err error
	f.Sessions, err = after.Misplaced(ctx)
	return f, err
}

// foreseeSlots fills in the future slots. changes reports whether a new member would get a slot.
func foreseeSlots(s *state.Service, ctx context.Context, before *state.Service, ns *netns.Handle) (changes bool) {
	for n := range s.Record.Service.Slots {
		slot := slots.State{Slot: n, State: "empty"}
		if before != nil && n < len(before.Slots) {
			slot = before.Slots[n]
		}
		m := s.Record.Service.Member(n)
		if m != nil && !(slot.Admitted() && slot.Member == m.String()) {
			if a, err := m.Adopt(ctx, ns, s.Record.Service.Spec); err == nil {
				slot = slots.State{Slot: n, State: "admitted", PID: a.PIDs()[0], Member: m.String()}
				a.Close()
				changes = true
			}
		}
		s.Slots = append(s.Slots, slot)
	}
	return changes
}

// ForeseeMove returns the devices that would move, and the sessions that would be reset.
func ForeseeMove(ctx context.Context, r *kernel.Root, s *state.Service, m record.Moving) (Foreseen, error) {
	if m.Device == "" {
		return foreseeChange(s, ctx, r, m.Apply)
	}
	return foreseeChange(s, ctx, r, m.Apply, m.Device)
}

// ForeseeDrain returns the devices that draining a slot, or undoing it, would move, and the sessions that would be reset.
func ForeseeDrain(ctx context.Context, r *kernel.Root, s *state.Service, slot int, back bool) (Foreseen, error) {
	return foreseeChange(s, ctx, r, func(p *record.Service) error {
		if back {
			return p.Undrain(slot)
		}
		return p.Drain(slot)
	})
}

func foreseeChange(s *state.Service, ctx context.Context, r *kernel.Root, f func(p *record.Service) error, named ...string) (Foreseen, error) {
	out := Foreseen{Service: s.Name}
	if s.Record == nil {
		return out, errors.New("the state was not read from pins")
	}
	p, err := record.Changed(r, s.PinScope, s.Record, f)
	if err != nil {
		return out, err
	}
	after := *s
	after.Record, after.Table, after.DeviceList = p, p.Table, p.List
	if out.Devices, err = movedBetween(r, s, &after, named...); err != nil {
		return out, err
	}
	out.Sessions, err = after.Misplaced(ctx)
	return out, err
}
