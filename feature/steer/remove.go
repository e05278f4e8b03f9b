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
	// Groups keep their program until it is taken from them, and devices their filter.
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

// dropCopies takes the filters of a namespace's copies away, also those whose pins cannot be read: they have a name.
func dropCopies(l *kernel.WriteLock, i kernel.Instance) error {
	if o, err := l.Open(i); err == nil {
		defer o.Close()
		if _, err := record.Shared.Decode(i, o.Meta); err == nil {
			return engine.RemoveCopies(l, i.Scope, o)
		}
	}
	ns, err := l.OpenScope("", i.Scope)
	if errors.Is(err, slots.ErrNetnsGone) {
		return nil // with its devices
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
