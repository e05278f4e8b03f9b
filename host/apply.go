// SPDX-License-Identifier: Apache-2.0

package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/user"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/kernel"
)

// What finishes a command that was stopped half way.
const (
	RemoveRemedy   = "weir remove again finishes it, weir apply brings back what is gone"
	RollbackRemedy = "weir rollback again, or a running weir serve, goes on"
)

// Host is this host as weir sees it: the pins below one root.
type Host struct {
	Root *kernel.Root
}

// New returns the host with its pins below root; empty is the default.
func New(root string) *Host { return &Host{Root: kernel.OpenRoot(root)} }

// defaultGroup may read weir's pins, if the host has such a group and the
// configuration names no other.
const defaultGroup = "weir"

// Done is one step that Apply carried out.
type Done struct {
	Step feature.Step
	Note string // what became of it, if not what was planned
}

// Plan says what Apply would do, and changes nothing.
func (h *Host) Plan(ctx context.Context, c *Config) (feature.Plan, error) {
	if _, err := c.gid(); err != nil {
		return feature.Plan{}, err
	}
	var all feature.Plan
	if err := h.Root.Usable(); err != nil { // Apply refuses it
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
			all.Warn("%s: what else changes is known once it is recovered: %v", f.Name, err)
			continue
		} else if err != nil {
			return feature.Plan{}, err
		}
		p.Steps = withoutRecovered(p.Steps, steps)
		all.Join(p)
	}
	return all, nil
}

// Apply makes the host match the configuration, after recovering what a killed
// command may have left. It calls each after every step. Slow work that follows, such as
// resets of misplaced sessions, is left to the feature.
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
	if err := l.SetGroup(gid); err != nil {
		return err
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
	if u.Waits() && u.Left <= 0 { // nobody was there to do it
		if err := h.rollBack(ctx, l, u, each); err != nil {
			return err
		}
	}
	plan, err := h.Plan(ctx, c)
	if err != nil {
		return kernel.Stopped(ctx, err, "nothing was changed")
	}
	if len(plan.Steps) == 0 && !(u.Waits() && c.Confirm > 0) {
		return unread(plan)
	}
	if u.Waits() && c.Confirm == 0 {
		return fmt.Errorf("%w, that of %s (%s left); nothing was changed: weir confirm, weir rollback, or apply --confirm this one, too", errUnconfirmed, u.Since.Format(time.TimeOnly), u.Left.Round(time.Second))
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
	err = plan.Apply(ctx, l, func(s feature.Step, note string) { each(Done{s, note}) })
	if err == nil {
		err = forgetChange(l) // of one that was taken back
	}
	return cmp.Or(err, unread(plan))
}

// unread is an error about the instances that a plan leaves as they are, nil where there are none.
func unread(p feature.Plan) error {
	if err := p.Unread.Err(); err != nil {
		return &appliedInPart{fmt.Errorf("all else is as the configuration has it; what cannot be read stays as it is: %w", err)}
	}
	return nil
}

// appliedInPart is the error of an apply that made everything match the file but what it could not read.
type appliedInPart struct{ error }

// Unwrap returns the reason.
func (e *appliedInPart) Unwrap() error { return e.error }

func (c *Config) warn(text string) {
	if c.Warned != nil {
		c.Warned(text)
	}
}

// warnUnrecorded warns of records that could not be written. Damage to their instances goes unnoticed.
func (c *Config) warnUnrecorded(l *kernel.WriteLock) {
	if err := l.Unrecorded(); err != nil {
		c.warn(fmt.Sprintf("damage to what is applied will not be noticed, and not be recovered: its record cannot be written: %v: fix that, then run weir apply again", err))
	}
}

// withoutRecovered leaves out what a recovery creates.
func withoutRecovered(steps, recoveries []feature.Step) []feature.Step {
	return slices.DeleteFunc(slices.Clone(steps), func(s feature.Step) bool {
		_, name, _ := strings.Cut(s.Object, " ")
		return s.Verb == "create" && slices.ContainsFunc(recoveries, func(r feature.Step) bool { return strings.HasSuffix(r.Object, "/"+name) })
	})
}

// recover makes damaged instances complete, so that the plan sees the state that there was.
func (h *Host) recover(ctx context.Context, l *kernel.WriteLock, only []string, each func(Done)) error {
	faults, err := h.Root.Check() // features attach by themselves what only they know of
	for _, s := range h.recoveries(faults, only) {
		note, serr := s.Do(ctx, l)
		if err = errors.Join(err, serr); serr == nil {
			each(Done{s, note})
		}
	}
	if err == nil && len(only) == 0 {
		l.ForgetLost() // all that they say is recorded again
	}
	return err
}

// finish finishes what killed commands left half done, and attaches again what can be. It tells of failures whose objects have none any more.
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

// recovered are the failures of objects that have none now. One of other words is a failure still.
func recovered(before, now []Finding) []Finding {
	return slices.DeleteFunc(slices.Clone(before), func(f Finding) bool {
		return slices.ContainsFunc(now, func(o Finding) bool { return o.Feature == f.Feature && o.Check == f.Check })
	})
}

// Remove takes a feature's state away, or every feature's if name is empty. Traffic that is served now and would not be is a
// reason to refuse, unless allowOutage says otherwise; a state that cannot be read is none.
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
				errs = append(errs, f.Remove(ctx, l))
			}
		}
		if ctx.Err() != nil {
			return kernel.Stopped(ctx, errors.Join(append(errs, ctx.Err())...), "half done: "+RemoveRemedy)
		}
		l.ForgetDamaged(func(i kernel.Instance) bool { return name == "" || i.Feature == name })
		return errors.Join(errs...)
	})
}

// RemovePart carries out a plan that removes a part of a feature, as the feature's own command does. It refuses outages like Remove.
func (h *Host) RemovePart(ctx context.Context, name string, allowOutage bool, plan func(context.Context, *kernel.Root) (feature.Plan, error)) error {
	some, err := named(name)
	if err != nil {
		return err
	}
	return h.remove(ctx, some, allowOutage, func() (feature.Plan, error) { return plan(ctx, h.Root) },
		func(l *kernel.WriteLock, p feature.Plan) error { return p.Apply(ctx, l, nil) })
}

// planRemove plans the removal of a feature.
func (h *Host) planRemove(ctx context.Context, f feature.Declared) (feature.Plan, error) {
	if x, ok := f.Value.(feature.RemovePlanner); ok {
		return x.PlanRemove(ctx, h.Root)
	}
	return f.Plan(ctx, h.Root, &feature.Document{})
}

// remove removes what a plan is about, features or parts of them, unless the plan has outages that are not allowed.
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
	err = do(l, p)
	if err != nil && ctx.Err() != nil {
		return err
	}
	err = errors.Join(err, h.forgetSaved(l, some))
	h.noFile(l, some)
	return err
}

// gid is the group that may read.
func (c *Config) gid() (int, error) {
	name := c.Group
	if name == "" {
		name = defaultGroup
	}
	g, err := user.LookupGroup(name)
	var unknown user.UnknownGroupError
	switch {
	case c.Group == "" && (errors.As(err, &unknown) || errors.Is(err, os.ErrNotExist)): // minimal systems have no /etc/group
		return 0, nil
	case err != nil:
		return 0, c.Pos.Errorf("group: %v: make it with 'groupadd --system %s', or leave the key out", err, name)
	}
	return strconv.Atoi(g.Gid)
}
