// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"errors"
	"net/netip"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/kernel"
)

// OutagesOfMove reports served traffic that a move would direct to an empty slot. The plan has no steps.
func OutagesOfMove(r *kernel.Root, s *state.Service, m record.Moving) (feature.Plan, error) {
	return outagesWithout(s, r, m.Apply)
}

// OutagesOfDrain reports served traffic that draining a slot, or undoing it, would direct to an empty slot.
func OutagesOfDrain(r *kernel.Root, s *state.Service, slot int, back bool) (feature.Plan, error) {
	return outagesWithout(s, r, func(p *record.Service) error {
		if back {
			return p.Undrain(slot)
		}
		return p.Drain(slot)
	})
}

func outagesWithout(s *state.Service, r *kernel.Root, f func(p *record.Service) error) (plan feature.Plan, err error) {
	if s.Record == nil {
		return plan, errors.New("the state was not read from pins")
	}
	if s.Bypassed || s.OnEmpty == spec.Next || s.OnEmpty == spec.Pass {
		return plan, nil
	}
	p, err := record.Changed(r, s.PinScope, s.Record, f)
	if err != nil {
		return plan, err
	}
	for n, buckets := range lostBuckets(p, s, emptyReasons(s)) {
		if buckets > 0 {
			plan.Outage("slot %d of service %s is empty and would get %d %% of the service's traffic, served now (on_empty: %s): %s: %s",
				n, s.Name, percent(buckets), s.OnEmpty, s.Slots[n].Reason, remedy(s.Record, n))
		}
	}
	after := *s
	after.Record, after.Table, after.DeviceList = p, p.Table, p.List
	return plan, movedDevices(s, &after, &plan)
}

// movedDevices adds the served devices that would move to an empty slot.
func movedDevices(s *state.Service, after *state.Service, plan *feature.Plan) error {
	had, have := s.Record.Moves(), after.Record.Moves()
	changes := map[netip.Addr]bool{}
	for a, slot := range had {
		if to, ok := have[a]; !ok || to != slot {
			changes[a] = true
		}
	}
	for a := range have {
		if _, ok := had[a]; !ok {
			changes[a] = true
		}
	}
	if len(changes) == 0 {
		return nil
	}
	old, err := s.Mapping(state.WhatIf{})
	if err != nil {
		return err
	}
	now, err := after.Mapping(state.WhatIf{})
	if err != nil {
		return err
	}
	for a := range changes {
		from, to := old.Assign(a), now.Assign(a)
		if from.Admitted && !to.Admitted {
			plan.Outage("device %s is served by slot %d of service %s, and would move to slot %d, which is empty (on_empty: %s): %s: %s",
				a, from.Slot, s.Name, to.Slot, s.OnEmpty, s.Slots[to.Slot].Reason, remedy(s.Record, to.Slot))
		}
	}
	return nil
}

// OutagesOfSteering reports traffic that bound sockets receive while the service is bypassed, and that an empty slot
// would get after the bypass.
func OutagesOfSteering(s *state.Service) (feature.Plan, error) {
	return outagesOfSteering(s, newBoundSockets())
}

// OutagesOfSteeringAll is [OutagesOfSteering] for every bypassed service. failed contains the errors of single
// services, by name. They do not prevent the others.
func OutagesOfSteeringAll(ctx context.Context, r *kernel.Root) (plan feature.Plan, failed map[string]error, err error) {
	all, err := r.Instances(spec.Name)
	if err != nil {
		return plan, nil, err
	}
	reader, bound := state.NewReader(r), newBoundSockets()
	defer reader.Close()
	failed = map[string]error{}
	for _, i := range all {
		if ctx.Err() != nil {
			return plan, failed, ctx.Err()
		}
		if !kernel.ValidName(i.Name) {
			continue
		}
		s, err := reader.Service(i)
		var one feature.Plan
		if err == nil {
			one, err = outagesOfSteering(&s, bound)
		}
		if err != nil && !errors.Is(err, kernel.ErrNotExist) {
			failed[i.Name] = err
		}
		plan.Join(one)
	}
	return plan, failed, nil
}

func outagesOfSteering(s *state.Service, bound *boundSockets) (plan feature.Plan, err error) {
	if s.Record == nil || !s.Bypassed || s.OnEmpty == spec.Pass {
		return plan, nil
	}
	ns, err := s.OpenNetns()
	if errors.Is(err, slots.ErrNetnsGone) {
		return plan, nil
	} else if err != nil {
		return plan, err
	}
	defer ns.Close()
	reasons := emptyReasons(s)
	lost := lostTo(s.Record, reasons)
	if sum(lost) == 0 || s.Engine == spec.EngineReuseport && !anyServed(s) {
		return plan, nil
	}
	losers, err := bound.losers(ns, s.PinScope, s.Endpoints)
	if err != nil || len(losers) == 0 {
		return plan, err
	}
	for n, buckets := range lost {
		if buckets > 0 {
			plan.Outage("slot %d of service %s is empty (on_empty: %s) and would get %d %% of the traffic of %s: %s: %s",
				n, s.Name, s.OnEmpty, percent(buckets), losers, reasons[n], remedy(s.Record, n))
		}
	}
	return plan, nil
}
