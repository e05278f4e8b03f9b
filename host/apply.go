// SPDX-License-Identifier: Apache-2.0

package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/kernel"
	pinrights "github.com/weir-project/weir/kernel/rights"
)

// Remedies for a command stopped midway.
const (
	RemoveRemedy   = "run weir remove again to finish it, or weir apply to restore the removed parts"
	RollbackRemedy = "run weir rollback again, or let a running weir serve continue"
)

// Host is this host: the pins below one root.
type Host struct {
	Root *kernel.Root
	// Warned receives warnings about completed changes: a change is in force, and a file about it stays.
	Warned func(warning string)
}

// warnIf warns of an error after a completed change.
func (h *Host) warnIf(done string, err error) {
	if err != nil && h.Warned != nil {
		h.Warned(fmt.Sprintf("%s, but %v", done, printable.OneLine(err.Error())))
	}
}

// New returns the host with its pins below root. An empty root means the default.
func New(root string) *Host { return &Host{Root: kernel.OpenRoot(root)} }

// Done is a step carried out by Apply.
type Done struct {
	Step feature.Step
	Note string // outcome, if it differs from the plan
}

// Plan returns the changes that Apply would make. It changes nothing.
func (h *Host) Plan(ctx context.Context, c *Config) (feature.Plan, error) {
	gid, err := c.gid()
	if err != nil {
		return feature.Plan{}, err
	}
	var all feature.Plan
	if err := cmp.Or(h.Root.Usable(), pinrights.Links(h.Root.Path())); err != nil { // Apply would reject it
		return all, err
	}
	faults, err := h.Faults(ctx)
	if err != nil {
		return all, err
	}
	for _, f := range faults {
		if !f.Damage() {
			all.Warn("%s", f)
		}
	}
	pinned, err := h.Root.Check()
	if err != nil {
		return all, err
	}
	steps := h.recoveries(pinned, c.Only)
	all.Steps = steps
	for _, f := range featuresOnly(c.Only) {
		p, err := f.Plan(ctx, h.Root, c.Document())
		if err != nil && len(steps) > 0 && ctx.Err() == nil {
			all.Warn("%s: further changes are known after its recovery: %v", f.Name, err)
			continue
		} else if err != nil {
			return feature.Plan{}, err
		}
		p.Steps = withoutRecovered(p.Steps, steps)
		all.Join(p)
	}
	h.planGroup(&all, gid)
	return all, nil
}

// Apply makes the host match the configuration, after recovering from a killed command. It calls each after every step.
// Slow work after the change, such as resets of misplaced sessions, is left to the feature.
func (h *Host) Apply(ctx context.Context, c *Config, each func(Done)) error {
	gid, err := c.gid()
	if err != nil {
		return err
	}
	for _, f := range featuresOnly(c.Only) {
		if f.Used(c.Document()) {
			if err := kernel.Require(f.Needs(c.Document())); err != nil {
				return err
			}
		}
	}
	l, err := h.Root.Lock(ctx)
	if err != nil {
		return err
	}
	defer l.Unlock()
	defer c.warnUnrecorded(l)
	err = h.applyLocked(ctx, l, c, gid, each)
	h.noteApplied(l, c, err)
	return err
}

func (h *Host) applyLocked(ctx context.Context, l *kernel.WriteLock, c *Config, gid int, each func(Done)) error {
	if _, other := h.otherGroup(gid); !other { // else it is a step of the plan
		if err := l.SetGroup(gid); err != nil {
			return err
		}
	}
	if err := h.recover(ctx, l, c.Only, each); err != nil {
		return err
	}
	if err := h.finish(ctx, l, c.Only, each); err != nil {
		return err
	}
	u, err := h.Unconfirmed()
	if err != nil {
		return err
	}
	if u != nil && u.Damaged != "" {
		c.warn(u.Finding().Object + " " + u.Finding().Text)
		h.warnIf("the unreadable change is ignored", forgetChange(l))
		u = nil
	}
	if u.Waits() && u.Left <= 0 { // no process was running to do it
		err := h.rollBack(ctx, l, u, each)
		if errors.Is(err, errNoState) { // nothing can roll it back any more, and this file replaces it
			c.warn(printable.OneLine(err.Error()))
			h.warnIf("the unconfirmed change is ignored", forgetChange(l))
			u, err = nil, nil
		}
		if err != nil {
			return err
		}
	}
	plan, err := h.Plan(ctx, c)
	if err != nil {
		return kernel.Stopped(ctx, err, "nothing was changed")
	}
	if len(plan.Steps) == 0 && !(u.Waits() && c.Confirm > 0) {
		h.ended(l)
		return unread(plan)
	}
	if u.Waits() && c.Confirm == 0 {
		return fmt.Errorf("%w: the change of %s (%s left); nothing was changed: run weir confirm or weir rollback, or apply this one with --confirm too", errUnconfirmed, u.Since.Format(time.TimeOnly), u.Left.Round(time.Second))
	}
	if err := plan.Refuse(c.AllowOutage); err != nil {
		return err
	}
	for _, w := range plan.Warnings {
		c.warn(w)
	}
	if c.Confirm > 0 {
		return cmp.Or(h.applyUnconfirmed(ctx, l, c.Confirm, plan, u, each), unread(plan))
	}
	err = h.underway(l, false, func() error {
		return plan.Apply(ctx, l, func(s feature.Step, note string) { each(Done{s, note}) })
	})
	if err == nil {
		h.warnIf("the change is in force", forgetChange(l)) // a rolled-back one
	}
	return cmp.Or(err, unread(plan))
}

// unread returns an error about the instances left unchanged by a plan, or nil if there are none.
func unread(p feature.Plan) error {
	if err := p.Unread.Err(); err != nil {
		return &appliedInPart{fmt.Errorf("applied, except that unreadable instances stay unchanged: %w", err)}
	}
	return nil
}

// appliedInPart is the error of an apply that succeeded except for unreadable instances.
type appliedInPart struct{ error }

// Unwrap returns the reason.
func (e *appliedInPart) Unwrap() error { return e.error }

func (c *Config) warn(text string) {
	if c.Warned != nil {
		c.Warned(text)
	}
}

// warnUnrecorded warns of unwritable records. Damage to their instances would go unnoticed.
func (c *Config) warnUnrecorded(l *kernel.WriteLock) {
	if err := l.Unrecorded(); err != nil {
		c.warn(fmt.Sprintf("cannot write records, so damage will go unnoticed and unrecovered: %v: fix the reason, then run weir apply again", err))
	}
}

// withoutRecovered omits the steps for instances created by a recovery.
func withoutRecovered(steps, recoveries []feature.Step) []feature.Step {
	return slices.DeleteFunc(slices.Clone(steps), func(s feature.Step) bool {
		_, name, _ := strings.Cut(s.Object, " ")
		return s.Verb == "create" && slices.ContainsFunc(recoveries, func(r feature.Step) bool { return strings.HasSuffix(r.Object, "/"+name) })
	})
}

// recover completes damaged instances. The plan then sees the previous state.
func (h *Host) recover(ctx context.Context, l *kernel.WriteLock, only []string, each func(Done)) error {
	faults, err := h.Root.Check() // attachments known only to features are added by them
	for _, s := range h.recoveries(faults, only) {
		note, serr := s.Do(ctx, l)
		if err = errors.Join(err, serr); serr == nil {
			each(Done{s, note})
		}
	}
	if err == nil && len(only) == 0 {
		l.ForgetLost() // all their instances are recorded again
	}
	return err
}

// finish completes changes of killed commands and adds missing attachments. It reports the failures solved by this.
func (h *Host) finish(ctx context.Context, l *kernel.WriteLock, only []string, each func(Done)) error {
	failures, _ := h.failing(ctx, only, false)
	if err := recoverAll(l, only); err != nil || len(failures) == 0 {
		return err
	}
	now, _ := h.failing(ctx, only, false)
	for _, f := range recovered(failures, now) {
		each(Done{Step: feature.Step{Verb: recoverVerb, Object: f.Feature + " " + f.Check, Detail: f.Text}})
	}
	return nil
}

// recovered returns the failures whose objects have none any more. A failure with a changed text is still a failure.
func recovered(before, now []Finding) []Finding {
	return slices.DeleteFunc(slices.Clone(before), func(f Finding) bool {
		return slices.ContainsFunc(now, func(o Finding) bool { return o.Feature == f.Feature && o.Check == f.Check })
	})
}

// Remove removes a feature's state, or every feature's if name is empty. It fails if that would take served traffic
// away, unless allowOutage is set. An unreadable state is not an obstacle.
func (h *Host) Remove(ctx context.Context, name string, allowOutage bool) error {
	some, err := named(name)
	if err != nil {
		return err
	}
	plan := func() (all feature.Plan, _ error) {
		for _, f := range some {
			if p, err := h.planRemove(ctx, f); err == nil {
				all.Join(p)
			}
		}
		return all, nil
	}
	return h.remove(ctx, some, allowOutage, plan, func(l *kernel.WriteLock, _ feature.Plan) error {
		var errs []error
		for _, f := range some {
			if ctx.Err() == nil {
				errs = append(errs, h.removeFeature(ctx, l, f))
			}
		}
		if ctx.Err() != nil {
			return kernel.Stopped(ctx, errors.Join(append(errs, ctx.Err())...), "half done: "+RemoveRemedy)
		}
		l.ForgetDamaged(func(i kernel.Instance) bool { return name == "" || i.Feature == name })
		return errors.Join(errs...)
	})
}

// removeFeature removes a feature's state. Its instances with lost pins can be an obstacle: their remaining pins are then
// removed first.
func (h *Host) removeFeature(ctx context.Context, l *kernel.WriteLock, f feature.Declared) error {
	err := f.Remove(ctx, l)
	if err == nil || ctx.Err() != nil {
		return err
	}
	faults, _ := kernel.NewChecker(h.Root).Check()
	damaged := kernel.Damaged(slices.DeleteFunc(faults, func(fault kernel.Fault) bool {
		return fault.Kind != kernel.FaultPins || !publishes(f, fault.Instance)
	}))
	if len(damaged) == 0 {
		return err
	}
	var errs []error
	for _, i := range damaged {
		errs = append(errs, l.Remove(i))
	}
	return errors.Join(append(errs, f.Remove(ctx, l))...)
}

// RemovePart applies a plan that removes a part of a feature, for the feature's own command. It rejects outages like
// Remove. It returns the removed objects.
func (h *Host) RemovePart(ctx context.Context, name string, allowOutage bool, plan func(context.Context, *kernel.Root) (feature.Plan, error)) (removed []string, err error) {
	some, err := named(name)
	if err != nil {
		return nil, err
	}
	err = h.remove(ctx, some, allowOutage, func() (feature.Plan, error) { return plan(ctx, h.Root) },
		func(l *kernel.WriteLock, p feature.Plan) error {
			return p.Apply(ctx, l, func(s feature.Step, _ string) { removed = append(removed, s.Object) })
		})
	return removed, err
}

// planRemove plans the removal of a feature.
func (h *Host) planRemove(ctx context.Context, f feature.Declared) (feature.Plan, error) {
	if x, ok := f.Value.(feature.RemovePlanner); ok {
		return x.PlanRemove(ctx, h.Root)
	}
	return f.Plan(ctx, h.Root, &feature.Document{})
}

// remove runs do under the lock, to remove features or parts of them, unless the plan has outages that are not allowed.
func (h *Host) remove(ctx context.Context, some []feature.Declared, allowOutage bool, plan func() (feature.Plan, error), do func(*kernel.WriteLock, feature.Plan) error) error {
	l, err := h.Root.Lock(ctx)
	if err != nil {
		return err
	}
	defer l.Unlock()
	p, err := plan()
	if err == nil {
		err = p.Refuse(allowOutage)
	}
	if err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return kernel.Stopped(ctx, err, "nothing was changed")
	}
	err = h.removing(l, func() error { return do(l, p) })
	if err != nil && ctx.Err() != nil {
		return err
	}
	if forgot := h.forgetSaved(l, some); err != nil {
		err = errors.Join(err, forgot)
	} else {
		h.warnIf("the removal is done", forgot)
	}
	h.noFile(l, some)
	if err == nil && h.blank() {
		h.ended(l)
	}
	return err
}
