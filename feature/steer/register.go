// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"

	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
)

// register is Register in the batch: its engine stays open.
func (b *batch) register(ctx context.Context, l *kernel.WriteLock, s slots.Slot, member *service.Member, vet *engine.Vetting) (changed bool, err error) {
	if e := b.of(s.Scope, s.Service); e != nil {
		return e.Register(ctx, e.Services[s.Service], s, member, vet)
	}
	return engine.RegisterSlot(ctx, l, s, member, vet)
}

// Remove implements feature.Feature.
func (Feature) Remove(ctx context.Context, l *kernel.WriteLock) error {
	all, err := l.Instances(spec.Name)
	if err != nil {
		return err
	}
	// Groups keep their program until it is taken from them, and devices their filter.
	for _, i := range all {
		if i == engine.CopyInstance(i.Scope) {
			o, err := l.Open(i)
			if err != nil {
				return err
			}
			defer o.Close()
			if err := engine.RemoveCopies(l, i.Scope, o); err != nil {
				return err
			}
		}
		if kind, ok := record.EngineKind(i); ok && kind == spec.EngineReuseport {
			e, err := engine.ReleaseGroups(l, i.Scope)
			if err != nil {
				return err
			}
			defer e.Close()
			defer e.PokeSocketHolder() // once its pins are gone, to see that it is not wanted any more
		}
	}
	// The programs first: what they would steer by goes after them.
	for _, engines := range []bool{true, false} {
		for _, i := range all {
			if err := ctx.Err(); err != nil {
				return err
			}
			if _, ok := record.EngineKind(i); ok == engines {
				if err := l.Remove(i); err != nil {
					return err
				}
			}
		}
	}
	return nil
}
