// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/kernel"
)

// BypassAll is [engine.Bypass] for every service of every namespace, from the pins alone. It returns the changed
// services. It continues after the failure of a service. When ctx is done, it applies the changes made so far.
func BypassAll(ctx context.Context, l *kernel.WriteLock, on bool) (did []string, err error) {
	all, err := l.Instances(spec.Name)
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, i := range all {
		kind, ok := record.EngineKind(i)
		if !ok {
			continue
		}
		if ctx.Err() != nil {
			errs = append(errs, ctx.Err())
			break
		}
		names, err := bypassEngine(ctx, l, i.Scope, kind, on)
		did = append(did, names...)
		if err != nil {
			errs = append(errs, fmt.Errorf("namespace %s, engine %s: %w", i.Scope, kind, err))
		}
	}
	slices.Sort(did)
	became := "nothing was changed"
	if len(did) > 0 {
		became = fmt.Sprintf("half done: %s are changed: repeat the command to finish", printable.Count(len(did), "service"))
	}
	return did, kernel.Stopped(ctx, errors.Join(errs...), became)
}

// bypassEngine changes all services of an engine. They take effect together.
func bypassEngine(ctx context.Context, l *kernel.WriteLock, scope string, kind spec.Engine, on bool) (did []string, err error) {
	e, err := engine.OpenEngine(l, scope, kind)
	if err != nil {
		return nil, err
	}
	defer e.Close()
	if err := e.Mark(true); err != nil {
		return nil, err
	}
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(e.Services)) {
		old := e.Services[name]
		if old.Bypassed == on {
			continue
		}
		if ctx.Err() != nil {
			errs = append(errs, ctx.Err())
			break
		}
		p, err := record.Changed(l.Root, scope, old, func(p *record.Service) error { p.Bypassed = on; return nil })
		if err == nil && !on { // meanwhile the kernel chose the member of each new session
			err = e.Owe(p, nil)
		}
		if err == nil {
			err = e.PublishService(p)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("service %s: %w", name, err))
			continue
		}
		kernel.Step("steer:published")
		did = append(did, name)
	}
	for _, name := range e.Kept.Names {
		errs = append(errs, fmt.Errorf("service %s is unreadable and stays unchanged", name))
	}
	errs = append(errs, e.Reconcile())
	return did, errors.Join(append(errs, engine.ReconcileCopies(l, scope, true))...)
}
