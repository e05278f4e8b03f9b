// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
)

// published is the spec of a guard, as its pins have it.
type published struct {
	Service Service `json:"service"`
	Netns   string  `json:"netns"` // what reopens the namespace
	Index   uint16  `json:"index"` // among the namespace's guards
}

// record is a guard as its pins describe it.
type record = instances.Record[published]

// guards are the instances of guards, shared that of what those of a namespace share.
var (
	guards = instances.Store[published]{Feature: Name, ABI: abi, Object: embedded, Is: func(name string) bool { return name != hooksName },
		Ref: func(p *published) string { return p.Netns }}
	shared = instances.Store[struct{}]{Feature: Name, ABI: abi, Object: embedded, Is: func(name string) bool { return name == hooksName }}
)

const maxGuards = 64 // GUARD_MAX

// failures are what keeps guards of a namespace from being in force, by service. The others are in force.
type failures map[string]error

func (f failures) add(service string, err error) {
	if was := f[service]; was != nil {
		err = fmt.Errorf("%w; %w", was, err)
	}
	f[service] = err
}

// others says what keeps the guards of other services from being in force, for whoever changes that of one.
func (f failures) others(service string) string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(f)) {
		if name != service {
			out = append(out, fmt.Sprintf("the guard of service %s still is not in force: %v", name, f[name]))
		}
	}
	return strings.Join(out, "; ")
}

// err is what keeps all of them from being in force, nil: nothing.
func (f failures) err() error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(f)) {
		errs = append(errs, fmt.Errorf("guard of service %s: %w", name, f[name]))
	}
	return errors.Join(errs...)
}

func embedded() []byte { return object }

// readPublished are the guards of a namespace, in order of name, and those that cannot be read.
func readPublished(r *kernel.Root, scope string) ([]record, failures, error) {
	all, unread, err := guards.In(r, scope)
	unreadable := failures{}
	for _, u := range unread {
		unreadable.add(u.Name, u)
	}
	return all, unreadable, err
}

// allocateIndex takes the guard's place among the namespace's: the one that it has, or a free one. It returns the guard that is there.
func (t *target) allocateIndex(l *kernel.WriteLock) (before *record, err error) {
	others, unreadable, err := readPublished(l.Root, t.instance.Scope)
	if err != nil {
		return nil, err
	}
	free := map[uint16]bool{}
	for i := range uint16(maxGuards) {
		free[i] = true
	}
	for _, o := range others {
		if o.Name == t.instance.Name {
			t.Index = o.Spec.Index
			return &o, nil
		}
		delete(free, o.Spec.Index)
	}
	if err := unreadable.err(); err != nil {
		return nil, fmt.Errorf("cannot allocate an index for the guard beside one that cannot be read (weir remove guard removes all of them): %w", err)
	}
	if len(free) == 0 {
		return nil, fmt.Errorf("the namespace has %d guards already, which is the most", maxGuards)
	}
	t.Index = slices.Min(slices.Collect(maps.Keys(free)))
	return nil, nil //nolint:nilnil // neither a guard nor an error
}

// publish creates or changes a guard. What its sources have earned stays with it. Others of the namespace that are not in
// force keep this one from nothing: the note says so.
func (t target) publish(l *kernel.WriteLock) (note string, err error) {
	before, err := t.allocateIndex(l)
	if err != nil {
		return "", err
	}
	ns, err := netns.Find(t.Netns, t.id)
	if err != nil {
		return "", err
	}
	defer ns.Close()
	state, each, err := t.maps(l, before != nil)
	if err != nil {
		return "", err
	}
	defer state.Close()
	defer each.Close()
	form := instances.Form[published]{Spec: t.published, Netns: ns, Pins: kernel.Pins{Maps: map[string]*ebpf.Map{pinState: state, pinEach: each}}}
	if err := guards.Publish(l, t.instance, form); err != nil {
		return "", err
	}
	kernel.Step("guard:published")
	failed, err := reconcile(l, t.instance.Scope)
	if err == nil {
		err = failed[t.Service.Name]
	}
	if err != nil {
		if back := t.rollBack(l, before, form); back != nil && back.Error() != err.Error() {
			err = fmt.Errorf("%w; and it could not be made what it was before: %w", err, back)
		}
		return "", err
	}
	return failed.others(t.Service.Name), nil
}

// rollBack has a guard that could not be put in place be what it was before, nil: not there. Killed before it is done,
// status says what is lacking, and the next command goes on. What could not be attached before cannot be now, and was told.
func (t target) rollBack(l *kernel.WriteLock, before *record, form instances.Form[published]) error {
	if before == nil {
		_, err := remove(l, t.instance)
		return err
	}
	form.Spec = before.Spec
	if err := guards.Publish(l, t.instance, form); err != nil {
		return err
	}
	kernel.Step("guard:taken-back")
	_, err := reconcile(l, t.instance.Scope)
	return err
}

// maps are the guard's own: those it has, or new ones.
func (t target) maps(l *kernel.WriteLock, has bool) (state, each *ebpf.Map, err error) {
	if has {
		o, err := l.Open(t.instance)
		if err != nil {
			return nil, nil, err
		}
		return o.Maps[pinState], o.Maps[pinEach], nil
	}
	if state, err = newState(t.Service.limits()); err != nil {
		return nil, nil, err
	}
	if each, err = newTargets(); err != nil {
		state.Close()
		return nil, nil, err
	}
	return state, each, nil
}

// remove takes a guard away. Others that are not in force keep it from nothing: the note says so.
func remove(l *kernel.WriteLock, i kernel.Instance) (note string, err error) {
	// The programs find it until reconcile: killed in between, the next command does the rest.
	if err := guards.Remove(l, i); err != nil {
		return "", err
	}
	kernel.Step("guard:removed")
	failed, err := reconcile(l, i.Scope)
	if errors.Is(err, netns.ErrGone) {
		err = removeScope(l, i.Scope)
	}
	return failed.others(i.Name), err
}
