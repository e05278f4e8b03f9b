// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// PublishInPlace publishes a service in place of old. The mark lets the next command recover from a kill at any step.
func (e *Engine) PublishInPlace(ctx context.Context, p, old *record.Service, ns *netns.Handle, rate *spec.Rate) error {
	if err := e.checkListens(p); err != nil {
		return err
	}
	if err := e.Mark(true); err != nil {
		return err
	}
	if err := kernel.Try("steer:marked"); err != nil {
		return err
	}
	if err := e.prepareRows(ctx, p, old, ns); err != nil {
		return err
	}
	if err := kernel.Try("steer:prepared"); err != nil {
		return err
	}
	if p.Misplaces(old) {
		if err := e.Owe(p, rate); err != nil {
			return err
		}
	}
	if err := e.PublishService(p); err != nil {
		return err
	}
	return kernel.Try("steer:published")
}

// checkListens rejects a service if an unreadable service listens on the same address and port.
func (e *Engine) checkListens(p *record.Service) error {
	if len(e.Kept.Names) == 0 || e.Kind == spec.EngineReuseport {
		return nil
	}
	havePorts, err := Entries[bpf.SteerPortKey, bpf.SteerPortValue](e.Pins.Maps["ports"])
	if err != nil {
		return err
	}
	havePrefixes, err := Entries[bpf.SteerPrefixKey, bpf.SteerTarget](e.Pins.Maps["prefixes"])
	ports, prefixes := record.Ports(map[string]*record.Service{p.Service.Name: p}, false)
	both := func(a, b bpf.SteerTarget) bool { return a.Service != 0 && b.Service != 0 && e.keeps(a.Service-1) }
	for k, v := range ports {
		if h := havePorts[k]; both(h.Any4, v.Any4) || both(h.Any6, v.Any6) {
			err = e.listensToo(p, k.Port)
		}
	}
	for k, t := range prefixes {
		if both(havePrefixes[k], t) {
			err = e.listensToo(p, k.Port)
		}
	}
	return err
}

func (e *Engine) listensToo(p *record.Service, port uint16) error {
	return fmt.Errorf("service %s: an unreadable service also listens on port %d (%s): use another port, or remove that service with the weir version of its pins", p.Service.Name, port, strings.Join(e.Kept.Names, ", "))
}

// prepareRows adopts the members of slots with new rows before any packet goes there, so the change loses no packet. An
// incomplete member is searched again after the service is published.
func (e *Engine) prepareRows(ctx context.Context, p, old *record.Service, ns *netns.Handle) error {
	for _, row := range p.Spare {
		if old != nil && slices.Contains(old.Spare, row) {
			continue
		}
		if err := e.clearRow(row, bpf.SteerSlot{}); err != nil {
			return err
		}
	}
	for slot, row := range p.Rows {
		if old != nil && slices.Contains(old.Rows, row) {
			continue
		}
		var s bpf.SteerSlot
		if err := e.Pins.Maps["slots"].Lookup(row, &s); err != nil {
			return err
		}
		err := e.clearRow(row, s)
		if err != nil {
			return err
		}
		if old == nil && e.Kind == spec.EngineSkLookup {
			err = e.AdmitServed(ctx, p, slot, ns)
		}
		if err != nil {
			return err
		}
		if old == nil {
			continue
		}
		if m := e.successor(p, old, slot); m != nil {
			if _, err := e.admit(ctx, p, slot, *m, ns); err != nil && !NotYet(err) {
				return err
			}
		}
		if slot < old.Service.Slots {
			if err := e.carryCounts(row, old.Row(slot)); err != nil {
				return err
			}
		}
	}
	return nil
}

// carryCounts copies a slot's counters to its new row, so they never decrease.
func (e *Engine) carryCounts(to, from uint32) error {
	m := e.Pins.Maps["verdicts"]
	for proto := range uint32(2) {
		var v []bpf.SteerVerdicts
		if err := m.Lookup(from*2+proto, &v); err != nil {
			return err
		}
		if err := m.Put(to*2+proto, v); err != nil {
			return err
		}
	}
	return nil
}
