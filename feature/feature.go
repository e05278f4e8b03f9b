// SPDX-License-Identifier: Apache-2.0

// Package feature defines the interfaces of weir's features, and their common parts. Each feature is a folder below this
// one. Features never import each other.
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

// Feature is one capability of a host. C is its part of the configuration, and S its displayed state.
type Feature[C, S any] interface {
	// Name is the pin directory, metric prefix, configuration key and command name.
	Name() string
	// Spec returns the feature's part of a configuration file. ok is false if the file has none.
	Spec(d *Document) (c C, ok bool)
	// Needs lists the kernel facilities used by the feature for c.
	Needs(c C) []kernel.Need
	// State reads the feature's state from its pins.
	State(ctx context.Context, r *kernel.Root) (S, error)
	// Plan describes the changes from have to want, as text and steps. It changes nothing.
	Plan(ctx context.Context, have S, want C) (Plan, error)
	// Remove removes all pins of the feature.
	Remove(ctx context.Context, l *kernel.WriteLock) error
}

// Runner is implemented by features that need a process. weir serve runs them.
type Runner interface {
	Run(ctx context.Context, r *kernel.Root, log Logger) error
}

// Upgrader is implemented by features that leave programs in the kernel. A newer weir replaces them under traffic.
type Upgrader interface {
	// PlanUpgrade plans the replacement of other versions' programs. It changes nothing.
	PlanUpgrade(ctx context.Context, r *kernel.Root) (Plan, error)
}

// Recoverer is implemented by features whose changes a kill can leave half done. Recover finishes them. The next command
// with the lock calls it.
type Recoverer interface {
	Recover(l *kernel.WriteLock) error
}

// Completer is implemented by features that can complete a damaged instance without losing its state. Damaged instances
// of other features are removed, and created again by Plan.
type Completer interface {
	// Complete completes an instance after kernel.WriteLock.Restore. lacks names the pins lost for good. note describes
	// the lost state.
	Complete(l *kernel.WriteLock, i kernel.Instance, lacks []string) (note string, err error)
}

// Mapped is implemented by features with other names of maps than NAME_… in the kernel. Recovery pins a recorded map again
// only if its name begins with one of the prefixes, because a damaged or forged record can name any map of the host.
type Mapped interface {
	MapPrefixes() []string
}

// Recorded is implemented by features with maps. PinnedMaps returns the names of the maps that the instance has in each
// version. ok is false for an instance that the feature never publishes. Recovery pins nothing by a record without
// these maps: a damaged or forged record can be of another instance.
type Recorded interface {
	PinnedMaps(i kernel.Instance) (names []string, ok bool)
}

// Shared is implemented by features whose items in the file share instances, one for each network namespace. Their names
// begin with @. Other instances with such names are derived from instances of items.
type Shared interface {
	Shares(instance string) bool // reports whether an instance holds items
}

// Restorer is implemented by features that a later process can restore after changes of pins and files: for weir apply
// --confirm, and for an apply that fails midway.
type Restorer interface {
	// Save returns the data for PlanRestore.
	Save(ctx context.Context, r *kernel.Root) ([]byte, error)
	// PlanRestore plans to restore the saved state. It omits gone network namespaces, with a warning. It changes
	// nothing.
	PlanRestore(ctx context.Context, r *kernel.Root, saved []byte) (Plan, error)
}

// RemovePlanner is implemented by features whose Remove removes more than a file without their section: it also removes
// the instances of other network namespaces.
type RemovePlanner interface {
	// PlanRemove lists the outages caused by Remove. It changes nothing.
	PlanRemove(ctx context.Context, r *kernel.Root) (Plan, error)
}

// Checked is implemented by features with attachments without records, such as nftables rules. Faults reports missing
// ones, like kernel.Checker. Planning or recovery attaches them again.
type Checked interface {
	Faults(ctx context.Context, r *kernel.Root) ([]kernel.Fault, error)
}

// Examiner is implemented by features that can find operational problems on a running host. doctor prints the findings,
// including the failures of the state.
type Examiner interface {
	Examine(ctx context.Context, r *kernel.Root) ([]Finding, error)
}

// Finding is a notable fact about the running host.
type Finding struct {
	Object string // name of the service, filter or other object
	Text   string
	Remedy string
	// Fails is set if something declared in the file does not work. Other findings are only notable.
	Fails bool
}

// Failing is implemented by states that can fail independently of their pins: a missing interface or attachment, or a
// link without a repair. Failures reads only the pins and the kernel, and asks no agent, member or peer. doctor prints
// them as failures. /healthz and weir_healthy depend on them. The text of a lasting failure must not change.
type Failing interface {
	Failures() []Finding
}

// Failure returns a finding about something that does not work.
func Failure(object, text, remedy string) Finding {
	return Finding{Object: object, Text: text, Remedy: remedy, Fails: true}
}

// Measured is implemented by features with metrics.
type Measured interface {
	Collector(r *kernel.Root) prometheus.Collector
}

// Logger receives the actions of a Runner: a short message with key-value pairs as in log/slog.
type Logger interface {
	Info(msg string, args ...any)
	Warn(msg string, args ...any)
}

// Plan is an ordered list of changes. An empty plan changes nothing.
type Plan struct {
	Steps    []Step
	Warnings []string                                               // deviations from the configuration that stay
	Undo     []func(ctx context.Context, l *kernel.WriteLock) error // undo a failed or interrupted apply, the last first
	Unread   instances.Unreadable                                   // unreadable instances, left unchanged
	Outages  []string                                               // traffic or protection lost by the change; a command rejects them unless they are allowed
}

// Warn adds a warning.
func (p *Plan) Warn(format string, a ...any) {
	p.Warnings = append(p.Warnings, fmt.Sprintf(format, a...))
}

// Stays warns of unreadable instances: the plan leaves them unchanged. Damaged ones are recovered before the plan is
// applied.
func (p *Plan) Stays(all instances.Unreadable) {
	for _, u := range all {
		if errors.Is(u.Err, kernel.ErrDamaged) {
			p.Warn("%s: further changes are known after its recovery: %v", u.Feature, u.Err)
			continue
		}
		p.Warn("%s %s stays as it is: %v", u.Feature, strings.TrimPrefix(u.Name, "@"), u)
		p.Unread = append(p.Unread, u)
	}
}

// Outage adds traffic taken from its receiver, or protection lost by the change, with the reason and the remedy.
func (p *Plan) Outage(format string, a ...any) {
	p.Outages = append(p.Outages, fmt.Sprintf(format, a...))
}

// ErrOutage is returned for a change that would take served traffic or working protection away.
var ErrOutage = errors.New("the change would take served traffic or working protection away")

// Refuse returns an error wrapping [ErrOutage] with the outages of a plan; nil if there are none or they are allowed.
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

// ErrNotUndone is returned if a failed change could not be undone.
var ErrNotUndone = errors.New("roll the change back")

// undoTime bounds the undoing of a plan.
const undoTime = 30 * time.Second

// Apply runs the steps, and calls each (if not nil) after every step. After a failure, or when ctx is done before a
// step, it undoes the plan as far as possible. The error describes the outcome.
func (p Plan) Apply(ctx context.Context, l *kernel.WriteLock, each func(s Step, note string)) error {
	for i, s := range p.Steps {
		err := ctx.Err()
		note, became := "", "rolled back: everything is as before"
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
			return errors.Join(fmt.Errorf("%s: %w", s, kernel.Stopped(ctx, err, "half done: run weir apply again to finish it")), fmt.Errorf("%w: %w", ErrNotUndone, undone))
		}
		if err := kernel.Stopped(ctx, err, became); errors.Is(err, context.Canceled) {
			return err
		}
		if i > 0 && len(p.Undo) > 0 {
			return fmt.Errorf("%s: %w; the earlier steps were undone: everything is as before", s, err)
		}
		return fmt.Errorf("%s: %w", s, err)
	}
	return nil
}

// RollBack undoes the completed part of the plan.
func (p Plan) RollBack(ctx context.Context, l *kernel.WriteLock) error {
	var errs []error
	for _, undo := range slices.Backward(p.Undo) {
		errs = append(errs, undo(ctx, l))
	}
	return errors.Join(errs...)
}

// Step is one change, with its description.
type Step struct {
	Verb   string // create, change, remove, adopt, upgrade
	Object string // "service telemetry"
	Detail string // details: "slots 4 → 5"
	Do     func(ctx context.Context, l *kernel.WriteLock) (note string, err error)
	// Foresee describes a current obstacle to the step's effect, or returns "". It may be nil. A dry run calls it.
	Foresee func(ctx context.Context) string
}

// String formats the step as printed in plans.
func (s Step) String() string {
	if s.Detail == "" {
		return s.Verb + " " + s.Object
	}
	return s.Verb + " " + s.Object + ": " + s.Detail
}

// Add appends a step.
func (p *Plan) Add(s Step) { p.Steps = append(p.Steps, s) }
