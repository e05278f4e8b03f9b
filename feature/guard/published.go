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

// published is the spec of a guard as recorded in its pins.
type published struct {
	Service Service `json:"service"`
	Netns   string  `json:"netns"` // name for reopening the namespace
	Index   uint16  `json:"index"` // among the namespace's guards
}

// record is a guard as recorded in its pins.
type record = instances.Record[published]

// guards is the store of guards, shared the store of @hooks instances, one for each namespace.
var (
	guards = instances.Store[published]{Feature: Name, ABI: abi, Object: embedded, Is: func(name string) bool { return name != hooksName },
		Ref: func(p *published) string { return p.Netns }}
	shared = instances.Store[struct{}]{Feature: Name, ABI: abi, Object: embedded, Is: func(name string) bool { return name == hooksName }}
)

const maxGuards = 64 // GUARD_MAX

// failures maps services to the reason for their guard not being in effect. All other guards are in
// effect.
type failures map[string]error

func (f failures) add(service string, err error) {
	if was := f[service]; was != nil {
		err = fmt.Errorf("%w; %w", was, err)
	}
	f[service] = err
}

// others describes the failed guards of other services, for a note after changing one service's
// guard.
func (f failures) others(service string) string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(f)) {
		if name != service {
			out = append(out, fmt.Sprintf("the guard of service %s is still not in force: %v", name, f[name]))
		}
	}
	return strings.Join(out, "; ")
}

// err joins all failures; nil if there are none.
func (f failures) err() error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(f)) {
		errs = append(errs, fmt.Errorf("guard of service %s: %w", name, f[name]))
	}
	return errors.Join(errs...)
}

func embedded() []byte { return object }

// readPublished returns the readable guards of a namespace, sorted by name, and the unreadable
// ones.
func readPublished(r *kernel.Root, scope string) ([]record, failures, error) {
	all, unread, err := guards.In(r, scope)
	unreadable := failures{}
	for _, u := range unread {
		unreadable.add(u.Name, u)
	}
	return all, unreadable, err
}

// allocateIndex chooses the guard's index in the namespace: its published one, or a free one. It
// returns the published guard, or nil.
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
		return nil, fmt.Errorf("allocate a guard index: another guard is unreadable (weir remove guard removes all guards): %w", err)
	}
	if len(free) == 0 {
		return nil, fmt.Errorf("allocate a guard index: the namespace already has the maximum of %d guards", maxGuards)
	}
	t.Index = slices.Min(slices.Collect(maps.Keys(free)))
	return nil, nil //nolint:nilnil // neither a guard nor an error
}

// publish creates or changes a guard. The state of its sources is preserved. Other guards not in
// effect do not prevent the change: the note names them.
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
			err = fmt.Errorf("%w; restore the previous guard: %w", err, back)
		}
		return "", err
	}
	return failed.others(t.Service.Name), nil
}

// rollBack restores a guard to before after a failed change; nil removes it. If the process is
// killed meanwhile, the status reports the rest, and the next command completes it. A guard not
// attachable before remains so: this was reported earlier.
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

// maps returns the guard's own maps: the published ones, or new ones.
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

// remove removes a guard. Other guards not in effect do not prevent it: the note names them.
func remove(l *kernel.WriteLock, i kernel.Instance) (note string, err error) {
	// The programs find it until reconcile. After a kill in between, the next command completes the
	// removal.
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
