// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"fmt"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/kernel"
)

var _ feature.Recoverer = Feature{}

// Recover implements feature.Recoverer. A service keeps its seed, its table and what
// operators changed; an engine keeps every map that is alive.
func (Feature) Recover(l *kernel.WriteLock, i kernel.Instance, lacks []string) (note string, err error) {
	if kind, ok := record.EngineKind(i); ok {
		return engine.RecoverEngine(l, i, kind, lacks)
	}
	if kernel.ValidName(i.Name) {
		return "", recoverService(l, i)
	}
	return "made anew", l.Remove(i) // it follows from the services
}

// recoverService publishes a service again as it was.
func recoverService(l *kernel.WriteLock, i kernel.Instance) error {
	p, err := record.Read(l.Root, i)
	if err != nil {
		return fmt.Errorf("recovering %s: %w", i, err)
	}
	e, err := engine.OpenEngine(l, i.Scope, p.Engine)
	if errors.Is(err, kernel.ErrNotExist) {
		ns, nerr := l.OpenNetns(i)
		if nerr != nil {
			return nerr
		}
		defer ns.Close()
		if err = engine.PublishEngine(l, ns, p.Engine, 0); err == nil {
			e, err = engine.OpenEngine(l, i.Scope, p.Engine)
		}
	}
	if err != nil {
		return err
	}
	defer e.Close()
	if err := e.Mark(true); err != nil {
		return err
	}
	if err := e.PublishService(p); err != nil {
		return err
	}
	kernel.Step("steer:service recovered")
	return e.Sync()
}
