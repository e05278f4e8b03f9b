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
	"github.com/weir-project/weir/kernel"
)

// OutagesOfMove says which traffic, served now, a move would give to an empty slot. The plan has no steps.
func OutagesOfMove(r *kernel.Root, s *ServiceState, m record.Moving) (feature.Plan, error) {
	return s.outagesOf(r, m.Apply)
}

// OutagesOfDrain says which traffic, served now, draining a slot, or taking that back, would give to an empty slot.
func OutagesOfDrain(r *kernel.Root, s *ServiceState, slot int, back bool) (feature.Plan, error) {
	return s.outagesOf(r, func(p *record.Service) error {
		if back {
			return p.Undrain(slot)
		}
		return p.Drain(slot)
	})
}

func (s *ServiceState) outagesOf(r *kernel.Root, f func(p *record.Service) error) (plan feature.Plan, err error) {
	if s.pub == nil {
		return plan, errors.New("a state that was not read from pins")
	}
	if s.Bypassed || s.OnEmpty == spec.Next || s.OnEmpty == spec.Pass {
		return plan, nil
	}
	p, err := record.Changed(r, s.scope, s.pub, f)
	if err != nil {
		return plan, err
	}
	for n, buckets := range lostBuckets(p, s, s.reasons()) {
		if buckets > 0 {
			plan.Outage("slot %d of service %s is empty, and would be given %d %% of the service's traffic, which is served now (on_empty: %s): %s: %s",
				n, s.Name, percent(buckets), s.OnEmpty, s.Slots[n].Reason, remedy(s.pub, n))
		}
	}
	after := *s
	after.pub, after.table, after.devices = p, p.Table, p.List
	return plan, s.movedDevices(&after, &plan)
}

// movedDevices adds the devices that are served, and whose move leads to an empty slot.
func (s *ServiceState) movedDevices(after *ServiceState, plan *feature.Plan) error {
	had, have := s.pub.Moves(), after.pub.Moves()
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
	old, err := s.mapping(WhatIf{})
	if err != nil {
		return err
	}
	now, err := after.mapping(WhatIf{})
	if err != nil {
		return err
	}
	for a := range changes {
		from, to := old.place(a), now.place(a)
		if from.Admitted && !to.Admitted {
			plan.Outage("device %s is served by slot %d of service %s, and slot %d, where it would go, is empty (on_empty: %s): %s: %s",
				a, from.Slot, s.Name, to.Slot, s.OnEmpty, s.Slots[to.Slot].Reason, remedy(s.pub, to.Slot))
		}
	}
	return nil
}

// OutagesOfSteering says which traffic bound sockets get while the service is bypassed, and an empty slot would get once it is
// steered again.
func OutagesOfSteering(s *ServiceState) (feature.Plan, error) {
	return s.outagesOfSteering(newBoundSockets())
}

// OutagesOfSteeringAll is [OutagesOfSteering] of every bypassed service. A service that cannot be asked is in failed, by name,
// and keeps no other from being asked.
func OutagesOfSteeringAll(ctx context.Context, r *kernel.Root) (plan feature.Plan, failed map[string]error, err error) {
	all, err := r.Instances(spec.Name)
	if err != nil {
		return plan, nil, err
	}
	reader, bound := newStateReader(r), newBoundSockets()
	defer reader.Close()
	failed = map[string]error{}
	for _, i := range all {
		if ctx.Err() != nil {
			return plan, failed, ctx.Err()
		}
		if !kernel.ValidName(i.Name) {
			continue
		}
		s, err := reader.service(i)
		var one feature.Plan
		if err == nil {
			one, err = s.outagesOfSteering(bound)
		}
		if err != nil && !errors.Is(err, kernel.ErrNotExist) {
			failed[i.Name] = err
		}
		plan.Join(one)
	}
	return plan, failed, nil
}

func (s *ServiceState) outagesOfSteering(bound *boundSockets) (plan feature.Plan, err error) {
	if s.pub == nil || !s.Bypassed || s.OnEmpty == spec.Pass {
		return plan, nil
	}
	ns, err := s.openNetns()
	if errors.Is(err, slots.ErrNetnsGone) {
		return plan, nil
	} else if err != nil {
		return plan, err
	}
	defer ns.Close()
	reasons := s.reasons()
	lost := lostTo(s.pub, reasons)
	if sum(lost) == 0 || s.Engine == spec.EngineReuseport && !s.served() {
		return plan, nil
	}
	losers, err := bound.losers(ns, s.scope, s.eps)
	if err != nil || len(losers) == 0 {
		return plan, err
	}
	for n, buckets := range lost {
		if buckets > 0 {
			plan.Outage("slot %d of service %s is empty (on_empty: %s) and would take %d %% of the traffic of %s: %s: %s",
				n, s.Name, s.OnEmpty, percent(buckets), losers, reasons[n], remedy(s.pub, n))
		}
	}
	return plan, nil
}
