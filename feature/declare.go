// SPDX-License-Identifier: Apache-2.0

package feature

import (
	"context"
	"errors"
	"slices"

	"github.com/weir-project/weir/kernel"
)

// Declared is a feature as seen by package host, independent of its spec and state types.
type Declared struct {
	Name  string
	Value any // the feature itself; a type assertion finds its other interfaces

	under          string     // parent key of the section; empty: it is at the top
	section        func() any // nil: no key at the top of the file
	newState       func() any // returns a pointer to an empty state
	serviceSection func() any // nil: no key in services
	spec           specOf
	state          func(ctx context.Context, r *kernel.Root) (any, error)
	plan           func(ctx context.Context, r *kernel.Root, d *Document) (Plan, error)
	remove         func(ctx context.Context, l *kernel.WriteLock) error
}

// specOf holds functions about a feature's part of a file.
type specOf struct {
	used     func(d *Document) bool
	validate func(d *Document) []error
	needs    func(d *Document) []kernel.Need
	claims   func(d *Document) []Claim
	listens  func(d *Document) []Listen
}

// Declare wraps a feature for package host.
func Declare[C, S any](f Feature[C, S]) Declared {
	d := Declared{Name: f.Name(), Value: f, remove: f.Remove, newState: func() any { return new(S) },
		state: func(ctx context.Context, r *kernel.Root) (any, error) { return f.State(ctx, r) },
		plan: func(ctx context.Context, r *kernel.Root, doc *Document) (Plan, error) {
			have, err := f.State(ctx, r)
			if err != nil {
				return Plan{}, err
			}
			want, _ := f.Spec(doc)
			plan, err := f.Plan(ctx, have, want)
			return undoable(f, plan), err
		},
	}
	d.spec = specOf{
		used:  func(doc *Document) bool { _, ok := f.Spec(doc); return ok },
		needs: func(doc *Document) []kernel.Need { c, _ := f.Spec(doc); return f.Needs(c) },
		validate: func(doc *Document) []error {
			c, _ := f.Spec(doc)
			if v, ok := any(&c).(interface{ Validate() []error }); ok {
				return v.Validate()
			}
			return nil
		},
		claims: func(doc *Document) []Claim {
			if x, ok := f.(Claimer[C]); ok {
				c, _ := f.Spec(doc)
				return x.Claims(c)
			}
			return nil
		},
		listens: func(doc *Document) []Listen {
			if x, ok := f.(Listener[C]); ok {
				c, _ := f.Spec(doc)
				return x.Listens(c)
			}
			return nil
		},
	}
	if s, ok := f.(Sectioned); ok {
		d.section = s.Section
	}
	if s, ok := f.(Nested); ok {
		d.under = s.Under()
	}
	if s, ok := f.(ServiceSectioned); ok {
		d.serviceSection = s.ServiceSection
	}
	return d
}

// Used reports whether the file has the feature's part.
func (d Declared) Used(doc *Document) bool { return d.spec.used(doc) }

// Validate checks the feature's part of the file. The errors have positions.
func (d Declared) Validate(doc *Document) []error { return d.spec.validate(doc) }

// Needs lists the kernel facilities used by the feature for the file.
func (d Declared) Needs(doc *Document) []kernel.Need { return d.spec.needs(doc) }

// Claims lists the file's hooks with room for one program.
func (d Declared) Claims(doc *Document) []Claim { return d.spec.claims(doc) }

// Listens lists the listen addresses of the feature's process in the file.
func (d Declared) Listens(doc *Document) []Listen { return d.spec.listens(doc) }

// State reads the feature's state from its pins.
func (d Declared) State(ctx context.Context, r *kernel.Root) (any, error) { return d.state(ctx, r) }

// NewState returns a pointer to an empty state, for decoding JSON.
func (d Declared) NewState() any { return d.newState() }

// Plan compares the host with the file. It changes nothing.
func (d Declared) Plan(ctx context.Context, r *kernel.Root, doc *Document) (Plan, error) {
	return d.plan(ctx, r, doc)
}

// Remove removes all pins of the feature.
func (d Declared) Remove(ctx context.Context, l *kernel.WriteLock) error { return d.remove(ctx, l) }

// undoable adds an Undo to a plan without one: it saves the feature before the first step, and restores it.
func undoable(f any, plan Plan) Plan {
	r, ok := f.(Restorer)
	if !ok || len(plan.Undo) > 0 || len(plan.Steps) == 0 {
		return plan
	}
	var saved []byte
	plan.Steps = slices.Clone(plan.Steps)
	for i, s := range plan.Steps {
		plan.Steps[i].Do = func(ctx context.Context, l *kernel.WriteLock) (note string, err error) {
			if saved == nil {
				saved, err = r.Save(ctx, l.Root)
			}
			if err != nil {
				return "", err
			}
			return s.Do(ctx, l)
		}
	}
	plan.Undo = append(plan.Undo, func(ctx context.Context, l *kernel.WriteLock) error {
		if saved == nil {
			return nil // no step has started
		}
		return putBack(ctx, l, f, r, saved)
	})
	return plan
}

// putBack restores a saved feature after a failed step. It tries every step of the restoration, despite failures.
func putBack(ctx context.Context, l *kernel.WriteLock, f any, r Restorer, saved []byte) error {
	var errs []error
	if m, ok := f.(Recoverer); ok {
		errs = append(errs, m.Recover(l))
	}
	plan, err := r.PlanRestore(ctx, l.Root, saved)
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	for _, s := range plan.Steps {
		if _, err := s.Do(ctx, l); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
