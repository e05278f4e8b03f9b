// SPDX-License-Identifier: Apache-2.0

package feature

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
)

// Set is a feature of independent instances, one for each item of its section in weir.yaml. I is an item of the file,
// and V is the item as shown by weir status. Set derives creation, change, recovery, upgrade, restoration and attachment
// in weir serve from Reconcile. A new feature embeds a Set in a type of its own, for more methods ([Explainer],
// [Examiner]).
type Set[I, V any] struct {
	Store instances.Store[I]
	// Items returns the items of the file. ok is false if it has no such section.
	Items func(d *Document) (items []I, ok bool)
	// NameOf returns the item's name, unique in its network namespace.
	NameOf func(item I) string
	// Netns opens the item's network namespace; nil: items belong to the host.
	Netns func(item I) (*netns.Handle, error)
	// NeedsOf lists the kernel facilities of items; without items, the facilities of any item.
	NeedsOf func(items []I) []kernel.Need
	// Reconcile makes the kernel match the item: it publishes or changes the instance, adds missing attachments and
	// installs this weir's program. It is idempotent: after a kill at any step, the next call finishes. ns is nil for
	// items of the host.
	Reconcile func(l *kernel.WriteLock, i kernel.Instance, ns *netns.Handle, item I) error
	// View reads an instance for weir status. doctor prints an error as a warning.
	View func(r *kernel.Root, rec instances.Record[I]) (V, error)
	// Lacks reports whether an instance lacks an attachment: weir serve then calls Reconcile. nil: nothing is attached
	// later.
	Lacks func(r *kernel.Root, rec instances.Record[I], watch func(ref string, id netns.ID)) (bool, error)
}

// SetState is the state of a Set.
type SetState[I, V any] struct {
	Items []V `json:"items"`

	records    []instances.Record[I]
	unreadable instances.Unreadable
	lacking    []kernel.Instance // instances without an attachment
	failures   []Finding
}

// Failures implements Failing.
func (st SetState[I, V]) Failures() []Finding { return st.failures }

// Unread implements Unreads.
func (st SetState[I, V]) Unread() instances.Unreadable { return st.unreadable }

// Empty implements Emptier.
func (s SetState[I, V]) Empty() bool { return len(s.Items) == 0 }

// Err returns the unreadable instances as an error, or nil.
func (s SetState[I, V]) Err() error { return s.unreadable.Err() }

// Name implements Feature.
func (s Set[I, V]) Name() string { return s.Store.Feature }

// Section implements Sectioned: a list of items.
func (s Set[I, V]) Section() any { return new([]I) }

// Spec implements Feature.
func (s Set[I, V]) Spec(d *Document) ([]I, bool) {
	if s.Items != nil {
		return s.Items(d)
	}
	return Section[[]I](d.Sections, s.Name())
}

// Needs implements Feature.
func (s Set[I, V]) Needs(items []I) []kernel.Need { return s.NeedsOf(items) }

// State implements Feature.
func (s Set[I, V]) State(_ context.Context, r *kernel.Root) (SetState[I, V], error) {
	all, unreadable, err := s.Store.All(r)
	st := SetState[I, V]{Items: []V{}, records: all, unreadable: unreadable}
	for _, rec := range all {
		v, verr := s.View(r, rec)
		if verr != nil {
			st.unreadable.Add(rec.Instance, verr)
		}
		st.Items = append(st.Items, v)
		s.examine(r, rec, &st)
	}
	return st, err
}

// examine checks whether an instance is attached.
func (s Set[I, V]) examine(r *kernel.Root, rec instances.Record[I], st *SetState[I, V]) {
	if gone, err := rec.Gone(); s.Lacks == nil || gone || err != nil {
		return // weir serve removes gone instances; only root can check attachments
	}
	if lacks, err := s.Lacks(r, rec, func(string, netns.ID) {}); err == nil && lacks {
		st.lacking = append(st.lacking, rec.Instance)
		st.failures = append(st.failures, Failure(rec.Name, "not attached everywhere", "run weir serve, or weir apply: both attach it"))
	}
}

// placed is an item with its instance.
type placed[I any] struct {
	item I
	inst kernel.Instance
}

// locate finds the instance of an item.
func (s Set[I, V]) locate(item I) (kernel.Instance, error) {
	ns, err := s.netns(item)
	if err != nil {
		return kernel.Instance{}, fmt.Errorf("%s.%s: netns: %w", s.Name(), s.NameOf(item), err)
	}
	if ns != nil {
		defer ns.Close()
	}
	return s.Store.Name(kernel.ScopeOf(ns), s.NameOf(item)), nil
}

func (s Set[I, V]) netns(item I) (*netns.Handle, error) {
	if s.Netns == nil {
		return nil, nil
	}
	return s.Netns(item)
}

// Plan implements Feature.
func (s Set[I, V]) Plan(_ context.Context, have SetState[I, V], want []I) (Plan, error) {
	var wanted []placed[I]
	for _, item := range want {
		i, err := s.locate(item)
		if err != nil {
			return Plan{}, err
		}
		wanted = append(wanted, placed[I]{item, i})
	}
	return s.plan(have, wanted)
}

func (s Set[I, V]) plan(have SetState[I, V], wanted []placed[I]) (plan Plan, err error) {
	for _, w := range wanted {
		at := slices.IndexFunc(have.records, func(rec instances.Record[I]) bool { return rec.Instance == w.inst })
		switch {
		case have.unreadable.Has(w.inst) && at < 0:
			plan.Warn("%s %s stays as it is: it cannot be read", s.Name(), w.inst.Name)
		case at < 0:
			plan.Add(s.step("create", w))
		case s.Store.Outdated(have.records[at]):
			plan.Add(s.step("upgrade", w))
		default:
			same, err := equal(have.records[at].Spec, w.item)
			if err != nil {
				return plan, err
			}
			if !same {
				plan.Add(s.step("change", w))
			} else if slices.Contains(have.lacking, w.inst) {
				plan.Add(s.step("attach", w))
			}
		}
	}
	for _, rec := range have.records {
		if !slices.ContainsFunc(wanted, func(w placed[I]) bool { return w.inst == rec.Instance }) {
			plan.Add(Step{Verb: "remove", Object: s.Name() + " " + rec.Name,
				Do: func(_ context.Context, l *kernel.WriteLock) (string, error) {
					return "", s.Store.Remove(l, rec.Instance)
				}})
		}
	}
	return plan, nil
}

// equal compares the recorded forms of two specs.
func equal[I any](a, b I) (bool, error) {
	x, err := json.Marshal(a)
	if err != nil {
		return false, err
	}
	y, err := json.Marshal(b)
	return string(x) == string(y), err
}

func (s Set[I, V]) step(verb string, w placed[I]) Step {
	return Step{Verb: verb, Object: s.Name() + " " + w.inst.Name,
		Do: func(_ context.Context, l *kernel.WriteLock) (string, error) { return "", s.reconcile(l, w) }}
}

func (s Set[I, V]) reconcile(l *kernel.WriteLock, w placed[I]) error {
	ns, err := s.netns(w.item)
	if err != nil {
		return err
	}
	if ns != nil {
		defer ns.Close()
		if scope := kernel.ScopeOf(ns); scope != w.inst.Scope {
			return fmt.Errorf("%w: the network namespace of %s has been replaced", netns.ErrGone, w.inst)
		}
	}
	return s.Reconcile(l, w.inst, ns, w.item)
}

// Remove implements Feature.
func (s Set[I, V]) Remove(_ context.Context, l *kernel.WriteLock) error {
	return s.Store.RemoveAll(l, "")
}

// Recover implements Recoverer. It removes instances without a network namespace.
func (s Set[I, V]) Recover(l *kernel.WriteLock) error { return s.Store.RemoveGone(l) }

// Complete implements Completer.
func (s Set[I, V]) Complete(l *kernel.WriteLock, i kernel.Instance, _ []string) (string, error) {
	rec, err := s.Store.Read(l.Root, i)
	if err == nil {
		err = s.again(l, rec)
		if !errors.Is(err, kernel.ErrDamaged) {
			return "attached again", err
		}
	}
	return "recreated by the plan", l.Remove(i)
}

// again reconciles an instance with its own record.
func (s Set[I, V]) again(l *kernel.WriteLock, rec instances.Record[I]) error {
	if rec.Scope == kernel.HostScope {
		return s.Reconcile(l, rec.Instance, nil, rec.Spec)
	}
	ns, err := rec.Netns()
	if err != nil {
		return err
	}
	defer ns.Close()
	return s.Reconcile(l, rec.Instance, ns, rec.Spec)
}

// PlanUpgrade implements Upgrader.
func (s Set[I, V]) PlanUpgrade(_ context.Context, r *kernel.Root) (plan Plan, err error) {
	all, _, err := s.Store.All(r)
	for _, rec := range all {
		if s.Store.Outdated(rec) {
			plan.Add(Step{Verb: "upgrade", Object: s.Name() + " " + rec.Name,
				Do: func(_ context.Context, l *kernel.WriteLock) (string, error) { return "", s.again(l, rec) }})
		}
	}
	return plan, err
}

// Save implements Restorer.
func (s Set[I, V]) Save(_ context.Context, r *kernel.Root) ([]byte, error) { return s.Store.Save(r) }

// PlanRestore implements Restorer.
func (s Set[I, V]) PlanRestore(ctx context.Context, r *kernel.Root, saved []byte) (Plan, error) {
	records, err := s.Store.Saved(saved)
	if err != nil {
		return Plan{}, err
	}
	have, err := s.State(ctx, r)
	if err != nil {
		return Plan{}, err
	}
	var wanted []placed[I]
	var lost []string
	for _, rec := range records {
		if gone, err := rec.Gone(); err != nil {
			return Plan{}, err
		} else if gone {
			lost = append(lost, rec.Name)
			continue
		}
		wanted = append(wanted, placed[I]{rec.Spec, rec.Instance})
	}
	plan, err := s.plan(have, wanted)
	for _, name := range lost {
		plan.Warn("%s %s is not restored: its network namespace is gone", s.Name(), name)
	}
	return plan, err
}

// Run implements Runner.
func (s Set[I, V]) Run(ctx context.Context, r *kernel.Root, log Logger) error {
	if s.Lacks == nil {
		<-ctx.Done()
		return nil
	}
	return Follower{
		Feature: s.Name(),
		Lacks: func(r *kernel.Root, i kernel.Instance, watch func(string, netns.ID)) (bool, error) {
			rec, err := s.Store.Read(r, i)
			if err != nil {
				return false, err
			}
			if gone, err := rec.Gone(); gone || err != nil {
				return gone, err
			}
			return s.Lacks(r, rec, watch)
		},
		Adopt: func(l *kernel.WriteLock, i kernel.Instance) (string, error) {
			rec, err := s.Store.Read(l.Root, i)
			if err != nil {
				return "", err
			}
			if gone, err := rec.Gone(); err != nil {
				return "", err
			} else if gone {
				return "removed: its network namespace is gone", s.Store.Remove(l, i)
			}
			return "attached", s.again(l, rec)
		},
	}.Run(ctx, r, log)
}

// Examine implements Examiner: it reports unreadable, invisible and detached instances.
func (s Set[I, V]) Examine(ctx context.Context, r *kernel.Root) ([]Finding, error) {
	st, err := s.State(ctx, r)
	return append(st.Failures(), UnreadFindings(st.unreadable)...), err
}
