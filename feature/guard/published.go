// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// published is a guard as its pins describe it.
type published struct {
	Service Service `json:"service"`
	Netns   string  `json:"netns"` // what reopens the namespace
	Index   uint16  `json:"index"` // among the namespace's guards
	netns.ID
}

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

// readPublished are the guards of a namespace, in order of name, and those that cannot be read.
func readPublished(r *kernel.Root, scope string) (out []published, unreadable failures, err error) {
	all, err := r.Instances(Name)
	if err != nil {
		return nil, nil, err
	}
	unreadable = failures{}
	for _, i := range all {
		if i.Scope != scope || i.Name == hooksName {
			continue
		}
		p, err := readOne(r, i)
		if errors.Is(err, kernel.ErrNotExist) {
			continue // removed meanwhile
		} else if err != nil {
			unreadable.add(i.Name, err)
			continue
		}
		out = append(out, p)
	}
	slices.SortFunc(out, func(a, b published) int { return strings.Compare(a.Service.Name, b.Service.Name) })
	return out, unreadable, nil
}

func readOne(r *kernel.Root, i kernel.Instance) (p published, err error) {
	meta, err := r.Meta(i)
	if err != nil {
		return p, err
	}
	if err := meta.RequireABI(i, ABI); err != nil {
		return p, err
	}
	if err := json.Unmarshal(meta.Config, &p); err != nil {
		return p, fmt.Errorf("%s: %w", i, err)
	}
	p.ID = meta.ID()
	return p, nil
}

// place takes the guard's place among the namespace's: the one that it has, or a free one.
func (t *target) place(l *kernel.WriteLock) (has bool, err error) {
	others, unreadable, err := readPublished(l.Root, t.scope)
	if err != nil {
		return false, err
	}
	free := map[uint16]bool{}
	for i := range uint16(maxGuards) {
		free[i] = true
	}
	for _, o := range others {
		if o.Service.Name == t.Service.Name {
			t.Index = o.Index
			return true, nil
		}
		delete(free, o.Index)
	}
	if err := unreadable.err(); err != nil {
		return false, fmt.Errorf("no guard is added beside one that cannot be read, for that one's place is not known (weir remove guard removes all of them): %w", err)
	}
	if len(free) == 0 {
		return false, fmt.Errorf("the namespace has %d guards already, which is the most", maxGuards)
	}
	t.Index = slices.Min(slices.Collect(maps.Keys(free)))
	return false, nil
}

// publish creates or changes a guard. What its sources have earned stays with it. Others of the namespace that are not in
// force keep this one from nothing: the note says so.
func (t target) publish(l *kernel.WriteLock) (note string, err error) {
	has, err := t.place(l)
	if err != nil {
		return "", err
	}
	var before *kernel.Meta
	if has {
		meta, err := l.Meta(guardInstance(t.scope, t.Service.Name))
		if err != nil {
			return "", err
		}
		before = &meta
	}
	ns, err := netns.Find(t.Netns, t.ID)
	if err != nil {
		return "", err
	}
	defer ns.Close()
	state, each, err := t.maps(l, has)
	if err != nil {
		return "", err
	}
	defer state.Close()
	defer each.Close()
	config, err := json.Marshal(t.published)
	if err != nil {
		return "", err
	}
	meta := kernel.Meta{ABI: ABI, Object: kernel.ObjectHash(object), Inode: t.Inode, Created: time.Now(), Version: Version, Config: config}
	meta.Cookie = ns.ID().Cookie
	pins := kernel.Pins{Maps: map[string]*ebpf.Map{pinState: state, pinEach: each}}
	if err := l.Publish(guardInstance(t.scope, t.Service.Name), meta, pins); err != nil {
		return "", err
	}
	kernel.Step("guard:published")
	failed, err := sync(l, t.scope)
	if err == nil {
		err = failed[t.Service.Name]
	}
	if err != nil {
		if back := t.takeBack(l, before, pins); back != nil && back.Error() != err.Error() {
			err = fmt.Errorf("%w; and it could not be made what it was before: %w", err, back)
		}
		return "", err
	}
	return failed.others(t.Service.Name), nil
}

// takeBack has a guard that could not be put in place be what it was before, nil: not there. Killed before it is done,
// status says what is lacking, and the next command goes on. What could not be attached before cannot be now, and was told.
func (t target) takeBack(l *kernel.WriteLock, before *kernel.Meta, pins kernel.Pins) error {
	if before == nil {
		_, err := remove(l, t.scope, t.Service.Name)
		return err
	}
	if err := l.Publish(guardInstance(t.scope, t.Service.Name), *before, pins); err != nil {
		return err
	}
	kernel.Step("guard:taken-back")
	_, err := sync(l, t.scope)
	return err
}

// maps are the guard's own: those it has, or new ones.
func (t target) maps(l *kernel.WriteLock, has bool) (state, each *ebpf.Map, err error) {
	if has {
		o, err := l.Open(guardInstance(t.scope, t.Service.Name))
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
func remove(l *kernel.WriteLock, scope, service string) (note string, err error) {
	// The programs find it until sync: killed in between, the next command does the rest.
	if err := l.Remove(guardInstance(scope, service)); err != nil {
		return "", err
	}
	kernel.Step("guard:removed")
	failed, err := sync(l, scope)
	if errors.Is(err, netns.ErrGone) {
		err = removeScope(l, scope)
	}
	return failed.others(service), err
}
