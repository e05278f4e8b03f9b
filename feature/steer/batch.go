// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"errors"
	"fmt"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/feature/steer/templates"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
)

// batch carries out the steps of one plan. It opens each engine once, and compares all maps with all services once, in
// the last step. Services of engine sk_lookup take effect together in that step. Services of engine sk_reuseport take
// effect one by one. undo reverts the whole batch.
type batch struct {
	vetted  bool // pins of removed namespaces are deleted
	engines map[kernel.Instance]*engine.Engine
	touched []*formerly
	bound   *boundSockets

	templates map[string]templates.Saved // by scope: removed with the last service
}

// formerly is a service before the batch changed it.
type formerly struct {
	scope, name string
	was         *record.Service // nil: it did not exist
	served      map[int]engine.ServedSlot
}

func newBatch() *batch {
	return &batch{engines: map[kernel.Instance]*engine.Engine{}, templates: map[string]templates.Saved{}, bound: newBoundSockets()}
}

// engine opens an engine of a namespace for all steps.
func (b *batch) engine(l *kernel.WriteLock, scope string, kind spec.Engine) (*engine.Engine, error) {
	i := record.EngineInstance(scope, kind)
	if e := b.engines[i]; e != nil {
		return e, nil
	}
	e, err := engine.OpenEngine(l, scope, kind)
	if err == nil {
		b.engines[i] = e
	}
	return e, err
}

// of returns the open engine of a service, or nil.
func (b *batch) of(scope, name string) *engine.Engine {
	for _, kind := range record.Engines {
		if e := b.engines[record.EngineInstance(scope, kind)]; e != nil && e.Services[name] != nil {
			return e
		}
	}
	return nil
}

// forget closes the engines of a namespace, because their pins may change.
func (b *batch) forget(scope string) error {
	var errs []error
	for _, kind := range record.Engines {
		i := record.EngineInstance(scope, kind)
		if e := b.engines[i]; e != nil {
			errs = append(errs, e.ReconcileMarked())
			e.Close()
			delete(b.engines, i)
		}
	}
	return errors.Join(errs...)
}

// note records a service before its first step.
func (b *batch) note(l *kernel.WriteLock, scope, name string) error {
	for _, f := range b.touched {
		if f.scope == scope && f.name == name {
			return nil
		}
	}
	f := &formerly{scope: scope, name: name}
	if e := b.of(scope, name); e != nil {
		f.was = e.Services[name]
	} else if was, err := record.Read(l.Root, record.Instance(scope, name)); err == nil {
		f.was = was
	} else if !errors.Is(err, kernel.ErrNotExist) && !errors.Is(err, kernel.ErrDamaged) {
		return err
	}
	b.touched = append(b.touched, f)
	if f.was == nil {
		return nil
	}
	e, err := b.engine(l, scope, f.was.Engine)
	if err != nil {
		return ignoreMissing(err)
	}
	f.served, err = e.ServedSlots(f.was)
	return err
}

func ignoreMissing(err error) error {
	if errors.Is(err, kernel.ErrNotExist) {
		return nil // apply recovers it
	}
	return err
}

// step wraps a step of one service.
func (b *batch) step(scope, name string, s feature.Step) feature.Step {
	do := s.Do
	s.Do = func(ctx context.Context, l *kernel.WriteLock) (string, error) {
		if err := ctx.Err(); err != nil {
			return "", err
		}
		if err := b.note(l, scope, name); err != nil {
			return "", err
		}
		return do(ctx, l)
	}
	return s
}

// removal returns the step that removes a service.
func (b *batch) removal(s *state.Service) feature.Step {
	scope, name := s.PinScope, s.Name
	step := engine.RemoveStep(scope, name)
	if kind := s.Engine; s.Problem != state.ProblemEngine {
		step.Do = func(_ context.Context, l *kernel.WriteLock) (string, error) {
			e, err := b.engine(l, scope, kind)
			if err != nil {
				return "", err
			}
			if err := e.Mark(true); err != nil {
				return "", err
			}
			e.Drop(name)
			err = l.Remove(record.Instance(scope, name))
			kernel.Step("steer:removed")
			return "", err
		}
	}
	return b.step(scope, name, step)
}

// finish makes the last step apply all changes and close the engines.
func (b *batch) finish(plan *feature.Plan) {
	plan.Undo = append(plan.Undo, b.undo)
	if len(plan.Steps) == 0 {
		return
	}
	last := &plan.Steps[len(plan.Steps)-1]
	do := last.Do
	last.Do = func(ctx context.Context, l *kernel.WriteLock) (string, error) {
		note, err := do(ctx, l)
		if err == nil {
			err = ctx.Err()
		}
		if err == nil {
			err = b.reconcile(l)
		}
		return note, err
	}
}

// gone returns the services of a namespace that the batch has removed or changed, in their previous form.
func (b *batch) gone(scope string) (out []*record.Service) {
	for _, f := range b.touched {
		if f.scope == scope && f.was != nil {
			out = append(out, f.was)
		}
	}
	return out
}

func (b *batch) reconcile(l *kernel.WriteLock) error {
	for i, e := range b.engines {
		scope := e.Scope
		if err := kernel.Try("steer:batch"); err != nil {
			return err
		}
		err := e.ReconcileMarked()
		if err == nil {
			err = engine.ReconcileCopies(l, scope, true, b.gone(scope)...)
		}
		if err == nil && e.Idle() {
			if b.templates[scope], err = templates.Save(l.Root, scope); err == nil {
				err = engine.RemoveTemplates(l, scope)
			}
			if err == nil {
				err = e.RemoveIdle()
			}
		}
		if err != nil {
			return err
		}
		if err := e.KeepSocketHolder(); err != nil {
			return err
		}
		e.Close()
		delete(b.engines, i)
	}
	return engine.ReconcileBind(l, true)
}

// undo restores every service, the last one first.
func (b *batch) undo(ctx context.Context, l *kernel.WriteLock) error {
	var errs []error
	for i := len(b.touched) - 1; i >= 0; i-- {
		f := b.touched[i]
		if err := b.restore(ctx, l, f); err != nil {
			errs = append(errs, fmt.Errorf("service %s: %w", f.name, err))
		}
	}
	b.touched = nil
	forgotten := b.templates
	b.templates = map[string]templates.Saved{}
	errs = append(errs, b.reconcile(l))
	for scope, t := range forgotten {
		errs = append(errs, t.Restore(l, scope))
	}
	return errors.Join(errs...)
}

// restore restores one service. It takes effect when the batch reconciles.
func (b *batch) restore(ctx context.Context, l *kernel.WriteLock, f *formerly) error {
	i := record.Instance(f.scope, f.name)
	now, err := record.Read(l.Root, i)
	if err != nil && !errors.Is(err, kernel.ErrNotExist) {
		return err
	}
	if f.was == nil && now == nil {
		return nil
	}
	if f.was != nil && now != nil && now.Engine != f.was.Engine {
		return b.restoreAlone(ctx, l, f)
	}
	last := f.was
	if last == nil {
		last = now
	}
	e, err := b.engine(l, f.scope, last.Engine)
	if errors.Is(err, kernel.ErrNotExist) && f.was != nil {
		return b.restoreAlone(ctx, l, f)
	} else if err != nil {
		return err
	}
	if err := e.Mark(true); err != nil {
		return err
	}
	if f.was == nil {
		e.Drop(f.name)
		return l.Remove(i)
	}
	old := e.Services[f.name]
	if err := e.PublishService(f.was); err != nil {
		return err
	}
	if err := e.ReconcileOne(f.was, old); err != nil {
		return err
	}
	ns, err := slots.OpenNetns(f.was.Netns, e.Pins.Meta.ID())
	if err != nil {
		return err
	}
	defer ns.Close()
	return returnSlots(e, ctx, f, ns)
}

// returnSlots gives slots back to their previous members.
func returnSlots(e *engine.Engine, ctx context.Context, f *formerly, ns *netns.Handle) error {
	e.Coming = f.served
	defer func() { e.Coming = nil }()
	var errs []error
	for slot, row := range f.was.Rows {
		h, had := f.served[slot]
		if who, err := slots.ProcessIn(e.Pins, row); err != nil || !had || who.PID == h.Member.PID {
			errs = append(errs, err)
			continue
		}
		errs = append(errs, e.AdmitServed(ctx, f.was, slot, ns))
	}
	return errors.Join(errs...)
}

// restoreAlone restores a service whose engine is not part of the batch.
func (b *batch) restoreAlone(ctx context.Context, l *kernel.WriteLock, f *formerly) error {
	if err := b.forget(f.scope); err != nil {
		return err
	}
	inode, err := record.ScopeInode(f.scope)
	if err != nil {
		return err
	}
	t := target{service: f.was.Service, scope: f.scope, netns: f.was.Netns, id: netns.ID{Inode: inode, Cookie: f.was.Cookie}, from: f.was, devices: f.was.List, served: f.served}
	t.service.Engine = f.was.Engine
	now, err := record.Read(l.Root, record.Instance(f.scope, f.name))
	if err == nil && now.Engine != f.was.Engine {
		return t.changeEngine(ctx, l)
	}
	if err := t.publish(ctx, l); err != nil {
		return err
	}
	e, err := engine.OpenEngine(l, f.scope, f.was.Engine)
	if err != nil {
		return err
	}
	defer e.Close()
	ns, err := slots.OpenNetns(t.netns, t.id)
	if err != nil {
		return err
	}
	defer ns.Close()
	again := *f
	again.was = e.Services[f.name]
	return returnSlots(e, ctx, &again, ns)
}

// admit is AdmitLocked in the batch: its engine stays open.
func (b *batch) admit(ctx context.Context, l *kernel.WriteLock, s slots.Slot, member *service.Member, vet *engine.Vetting) (changed bool, err error) {
	if e := b.of(s.Scope, s.Service); e != nil {
		return e.Admit(ctx, e.Services[s.Service], s, member, vet)
	}
	return engine.AdmitLocked(ctx, l, s, member, vet)
}
