// SPDX-License-Identifier: Apache-2.0

// Package feature is what the features of weir have in common: the small
// interface that each implements. A feature is a folder below this one, and
// features never import each other.
package feature

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
)

// Feature is one capability of a host. C is its part of the configuration, S
// what it shows of itself.
type Feature[C, S any] interface {
	// Name is the pin directory, metric prefix, config key and CLI noun.
	Name() string
	// Spec is the feature's part of a configuration file; ok is false if the file says nothing of it.
	Spec(d *Document) (c C, ok bool)
	// Needs lists the facilities of the kernel that the feature uses for c.
	Needs(c C) []kernel.Need
	// State reads the feature from its pins alone.
	State(ctx context.Context, r *kernel.Root) (S, error)
	// Plan compares: what would change, in words and steps. It changes nothing.
	Plan(ctx context.Context, have S, want C) (Plan, error)
	// Remove takes away everything of the feature that is pinned.
	Remove(ctx context.Context, l *kernel.WriteLock) error
}

// Runner is implemented by features that need a process: weir serve runs them.
type Runner interface {
	Run(ctx context.Context, r *kernel.Root, log Logger) error
}

// Upgrader is implemented by features that leave programs in the kernel: a newer
// weir puts its own in place of them, under traffic.
type Upgrader interface {
	// PlanUpgrade says whose programs are another weir's and what would change.
	// It changes nothing.
	PlanUpgrade(ctx context.Context, r *kernel.Root) (Plan, error)
}

// Recoverer is implemented by features whose changes a killed command can leave half
// done: the next one that takes the lock finishes them.
type Recoverer interface {
	Recover(l *kernel.WriteLock) error
}

// Completer is implemented by features that can make a damaged instance complete without
// losing what it was made of. The others' instances are removed, and made anew by Plan.
type Completer interface {
	// Complete completes an instance after kernel.WriteLock.Restore: lacks are the pins
	// that nothing holds any more. It returns what it could not keep.
	Complete(l *kernel.WriteLock, i kernel.Instance, lacks []string) (note string, err error)
}

// Restorer is implemented by features that can be put back to what they were, by a later process, after pins and files
// have changed: weir apply --confirm, and an apply that fails half way.
type Restorer interface {
	// Save returns all that PlanRestore needs.
	Save(ctx context.Context, r *kernel.Root) ([]byte, error)
	// PlanRestore plans to make the feature as it was saved. It leaves out network namespaces that are gone, with a
	// warning. It changes nothing.
	PlanRestore(ctx context.Context, r *kernel.Root, saved []byte) (Plan, error)
}

// RemovePlanner is implemented by features whose Remove takes away more than a file without their section: the instances of other
// network namespaces.
type RemovePlanner interface {
	// PlanRemove tells of the outages of Remove. It changes nothing.
	PlanRemove(ctx context.Context, r *kernel.Root) (Plan, error)
}

// Checked is implemented by features with attachments that no record tells of: rules of nftables. Where
// they are missing is told as kernel.Checker's faults are; planning or recovery attaches them again.
type Checked interface {
	Faults(ctx context.Context, r *kernel.Root) ([]kernel.Fault, error)
}

// Examiner is implemented by features that can say what would make them useless on
// a running host, for doctor: the failures of their state among it.
type Examiner interface {
	Examine(ctx context.Context, r *kernel.Root) ([]Finding, error)
}

// Finding is something about what runs that an operator should know.
type Finding struct {
	Object string // what it is about: the name of a service, of a filter
	Text   string
	Remedy string
	// Fails says that something the file declares does not work. The other findings are worth knowing.
	Fails bool
}

// Failing is implemented by the states of features that can fail beside their pins: an interface is gone, nothing is attached, a
// link has no way around. They are told from the pins and the kernel: no agent, member or peer is asked. doctor calls them
// failures, /healthz and weir_healthy go by them. The text of one that lasts stays the same.
type Failing interface {
	Failures() []Finding
}

// Failure is a finding that something does not work.
func Failure(object, text, remedy string) Finding {
	return Finding{Object: object, Text: text, Remedy: remedy, Fails: true}
}

// Measured is implemented by features that have metrics.
type Measured interface {
	Collector(r *kernel.Root) prometheus.Collector
}

// Logger receives what a Runner did, one sentence a call, with key-value pairs
// as log/slog has them.
type Logger interface {
	Info(msg string, args ...any)
	Warn(msg string, args ...any)
}

// Plan is an ordered list of changes; an empty one changes nothing.
type Plan struct {
	Steps    []Step
	Warnings []string                                               // what stays as it is, and the configuration alone would not say
	Undo     []func(ctx context.Context, l *kernel.WriteLock) error // takes back what a failed or interrupted apply did, the last first
	Unread   instances.Unreadable                                   // instances that stay as they are, as they cannot be read
	Outages  []string                                               // traffic that is served, or protected, now and would not be: a command refuses them unless told otherwise
}

// Warn adds a warning.
func (p *Plan) Warn(format string, a ...any) {
	p.Warnings = append(p.Warnings, fmt.Sprintf(format, a...))
}

// Stays warns of instances that cannot be read: the plan leaves them as they are. Applying recovers damaged ones first.
func (p *Plan) Stays(all instances.Unreadable) {
	for _, u := range all {
		if errors.Is(u.Err, kernel.ErrDamaged) {
			p.Warn("%s: what else changes is known once it is recovered: %v", u.Feature, u.Err)
			continue
		}
		p.Warn("%s %s stays as it is: %v", u.Feature, strings.TrimPrefix(u.Name, "@"), u)
		p.Unread = append(p.Unread, u)
	}
}

// Outage adds traffic that the change takes away from its receiver, or a protection that it takes off, with the reason and the remedy.
func (p *Plan) Outage(format string, a ...any) {
	p.Outages = append(p.Outages, fmt.Sprintf(format, a...))
}

// ErrOutage says that a change would take traffic away that is served now, or protection that works now.
var ErrOutage = errors.New("the change takes traffic away that is served now, or protection that works now")

// Refuse is an error that wraps [ErrOutage] and names the outages of a plan; nil if there is none, or all are allowed.
func (p *Plan) Refuse(allowed bool) error {
	if len(p.Outages) == 0 || allowed {
		return nil
	}
	return fmt.Errorf("%w; nothing was changed:\n  %s\nfix the reason, or give --allow-outage", ErrOutage, strings.Join(p.Outages, "\n  "))
}

// Join appends another plan.
func (p *Plan) Join(q Plan) {
	p.Steps = append(p.Steps, q.Steps...)
	p.Warnings = append(p.Warnings, q.Warnings...)
	p.Unread = append(p.Unread, q.Unread...)
	p.Outages = append(p.Outages, q.Outages...)
	p.Undo = append(p.Undo, q.Undo...)
}

// ErrNotUndone says that a failed change could not be taken back either.
var ErrNotUndone = errors.New("taking the change back")

// undoTime is how long taking a plan back may last.
const undoTime = 30 * time.Second

// Apply carries out the steps, and calls each, which may be nil, after every one. When one fails, or ctx is done before it, everything is taken
// back that the plan can take back: the error says what became of it.
func (p Plan) Apply(ctx context.Context, l *kernel.WriteLock, each func(s Step, note string)) error {
	for i, s := range p.Steps {
		err := ctx.Err()
		note, became := "", "taken back: everything is as it was"
		switch {
		case err == nil:
			note, err = s.Do(ctx, l)
		case i == 0:
			became = "nothing was changed"
		}
		if err == nil {
			if each != nil {
				each(s, note)
			}
			continue
		}
		back, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
		defer cancel()
		if undone := p.RollBack(back, l); undone != nil {
			return errors.Join(fmt.Errorf("%s: %w", s, kernel.Stopped(ctx, err, "half done: weir apply again goes on from there")), fmt.Errorf("%w: %w", ErrNotUndone, undone))
		}
		if err := kernel.Stopped(ctx, err, became); errors.Is(err, context.Canceled) {
			return err
		}
		return fmt.Errorf("%s: %w", s, err)
	}
	return nil
}

// RollBack takes back what was done of the plan.
func (p Plan) RollBack(ctx context.Context, l *kernel.WriteLock) error {
	var errs []error
	for _, undo := range slices.Backward(p.Undo) {
		errs = append(errs, undo(ctx, l))
	}
	return errors.Join(errs...)
}

// Step is one change, in words and in deed.
type Step struct {
	Verb   string // create, change, remove, adopt, upgrade
	Object string // "service telemetry"
	Detail string // what about it: "slots 4 → 5"
	Do     func(ctx context.Context, l *kernel.WriteLock) (note string, err error)
	// Foresee says what keeps the step from its effect as things are, "" if nothing does. It may be nil. A dry run asks it.
	Foresee func(ctx context.Context) string
}

// String is the step as plans print it.
func (s Step) String() string {
	if s.Detail == "" {
		return s.Verb + " " + s.Object
	}
	return s.Verb + " " + s.Object + ": " + s.Detail
}

// Add appends a step.
func (p *Plan) Add(s Step) { p.Steps = append(p.Steps, s) }
