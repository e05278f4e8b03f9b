// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/internal/netns"
)

// outages adds the slots that a change of a service would empty, and the served traffic it would direct to an empty
// slot.
func (t *target) outages(ctx context.Context, plan *feature.Plan, s *state.Service, kind spec.Engine) error {
	if s.Bypassed || !anyServed(s) {
		return nil // no traffic is steered now
	}
	p := &record.Service{Service: t.service}
	p.SetDevices(t.devices)
	p.Shape(s.Record)
	anew := kind != s.Engine || !sameEndpoints(p, s.Record)
	if !anew && slices.Equal(p.Table, s.Table) && p.Service.OnEmpty == s.OnEmpty {
		return nil
	}
	ns, err := slots.OpenNetns(t.netns, t.id)
	if errors.Is(err, slots.ErrNetnsGone) {
		return nil
	} else if err != nil {
		return err
	}
	defer ns.Close()
	reasons := t.emptyAfter(ctx, s.Slots, anew, ns)
	t.empty = reasons
	lost := lostBuckets(p, s, reasons)
	for n := range t.service.Slots {
		object := fmt.Sprintf("slot %d of service %s", n, t.service.Name)
		switch {
		case reasons[n] == nil:
		case n < len(s.Slots) && s.Slots[n].Admitted():
			plan.Outage("%s would be emptied: %v", object, reasons[n])
		case lost[n] > 0 && n >= len(s.Slots):
			plan.Outage("%s would get %d %% of the service's traffic and stay empty (on_empty: %s): %v", object, percent(lost[n]), p.Service.OnEmpty, reasons[n])
		case lost[n] > 0:
			plan.Outage("%s is empty and would get %d %% of the service's traffic, served now (on_empty: %s): %v", object, percent(lost[n]), p.Service.OnEmpty, reasons[n])
		}
	}
	return nil
}

func percent(buckets int) int { return max(1, buckets*100/spec.Buckets) }

// emptyAfter returns the reason of each slot that would be empty after a change, nil for the others. anew means that
// members are admitted again.
func (t *target) emptyAfter(ctx context.Context, slots []slots.State, anew bool, ns *netns.Handle) []error {
	out := make([]error, t.service.Slots)
	for n := range out {
		m := t.service.Member(n)
		if n < len(slots) && slots[n].Admitted() {
			if !anew {
				continue
			}
			if m == nil || m.User != "" {
				m = slots[n].OccupantMember(m)
			}
		}
		if m == nil {
			out[n] = errors.New("no member is configured")
			continue
		}
		a, err := m.Adopt(ctx, ns, t.service.Spec)
		if out[n] = err; err == nil {
			a.Close()
		}
	}
	return out
}

// lostBuckets counts, by slot, the buckets with served traffic that would lose their member.
func lostBuckets(p *record.Service, s *state.Service, reasons []error) []int {
	if p.Service.OnEmpty == spec.Next || p.Service.OnEmpty == spec.Pass {
		return make([]int, len(reasons))
	}
	return countLost(p, reasons, func(b int) bool { // buckets served now
		return b < len(s.Table) && int(s.Table[b]) < len(s.Slots) && s.Slots[s.Table[b]].Admitted() || s.OnEmpty == spec.Next || s.OnEmpty == spec.Pass
	})
}

// removalOutages adds the members without traffic after the removal of the service. The kernel knows a member only by
// its bound addresses.
func removalOutages(s *state.Service, plan *feature.Plan) {
	if s.Bypassed || s.Record == nil {
		return
	}
	for _, slot := range s.Slots {
		m := s.Record.Service.Member(slot.Slot)
		if !slot.Admitted() || m == nil {
			continue
		}
		if elsewhere := s.Record.Service.Elsewhere(*m); len(elsewhere) > 0 {
			plan.Outage("slot %d of service %s would be removed, and its member is bound elsewhere (%v): without weir no traffic of the service reaches it", slot.Slot, s.Name, elsewhere)
		}
	}
}
