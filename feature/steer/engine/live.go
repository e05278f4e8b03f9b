// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
)

// Change alters the overrides of a published service, not its configuration. One store applies the change, for all
// protocols at once.
func Change(l *kernel.WriteLock, scope, name string, rate *spec.Rate, f func(p *record.Service) error) error {
	e, old, err := OpenSlot(l, slots.Slot{Scope: scope, Service: name})
	if err != nil {
		return err
	}
	defer e.Close()
	p, err := record.Changed(l.Root, scope, old, f)
	if err != nil {
		return err
	}
	return e.replace(p, old, rate)
}

// replace publishes p over old. Both have the same endpoints and rows.
func (e *Engine) replace(p, old *record.Service, rate *spec.Rate) error {
	if err := e.Mark(true); err != nil {
		return err
	}
	kernel.Step("steer:marked")
	if p.Misplaces(old) {
		if err := e.Owe(p, rate); err != nil {
			return err
		}
	}
	if err := e.PublishService(p); err != nil {
		return err
	}
	kernel.Step("steer:published")
	return e.Reconcile()
}

// Move moves a device or a bucket to another slot, or back. rate limits the resets that follow; nil means the service's
// rate.
func Move(l *kernel.WriteLock, scope, service string, m record.Moving, rate *spec.Rate) error {
	return Change(l, scope, service, rate, m.Apply)
}

// Drain moves a slot's buckets to the other slots until Undrain, as if its weight were 0. Its member stays.
func Drain(l *kernel.WriteLock, s slots.Slot, rate *spec.Rate) error {
	return Change(l, s.Scope, s.Service, rate, func(p *record.Service) error { return p.Drain(s.Slot) })
}

// Undrain gives a drained slot its buckets back.
func Undrain(l *kernel.WriteLock, s slots.Slot, rate *spec.Rate) error {
	return Change(l, s.Scope, s.Service, rate, func(p *record.Service) error { return p.Undrain(s.Slot) })
}
