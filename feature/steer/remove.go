// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"errors"

	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
)

// Remove implements feature.Feature.
func (Feature) Remove(ctx context.Context, l *kernel.WriteLock) error {
	all, err := l.Instances(spec.Name)
	if err != nil {
		return err
	}
	// Groups keep their program and devices their filter until both are detached.
	for _, i := range all {
		if i == engine.CopyInstance(i.Scope) {
			if err := dropCopies(l, i); err != nil {
				return err
			}
		}
		if kind, ok := record.EngineKind(i); ok && kind == spec.EngineReuseport {
			e, err := engine.ReleaseGroups(l, i.Scope)
			if errors.Is(err, kernel.ErrABI) || errors.Is(err, kernel.ErrDamaged) || errors.Is(err, kernel.ErrNotExist) {
				err = engine.DropReuse(l, i)
				if err == nil {
					continue
				}
			}
			if err != nil {
				return err
			}
			defer e.Close()
			defer e.PokeSocketHolder() // after its pins are removed, so it exits
		}
	}
	// Remove the programs first, then the maps they use.
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

// dropCopies removes the filters of a namespace's copies. Filters with unreadable pins are found by name.
func dropCopies(l *kernel.WriteLock, i kernel.Instance) error {
	if o, err := l.Open(i); err == nil {
		defer o.Close()
		if _, err := record.Shared.Decode(i, o.Meta); err == nil {
			return engine.RemoveCopies(l, i.Scope, o)
		}
	}
	ns, err := l.OpenScope("", i.Scope)
	if errors.Is(err, slots.ErrNetnsGone) {
		return nil // the devices vanished with the namespace
	} else if err != nil {
		return err
	}
	defer ns.Close()
	return ns.Do(func() error {
		devices, err := spec.CopyDevices()
		for index := range devices {
			err = errors.Join(err, kernel.Clsact{Ifindex: int(index), Name: engine.CopyFilter}.Detach(false))
		}
		return err
	})
}
