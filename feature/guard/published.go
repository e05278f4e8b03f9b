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
	Inode   uint64  `json:"inode"`
	Index   uint16  `json:"index"` // among the namespace's guards
}

const maxGuards = 64 // GUARD_MAX

// readPublished are the guards of a namespace, in order of name.
func readPublished(r *kernel.Root, scope string) ([]published, error) {
	all, err := r.Instances(Name)
	if err != nil {
		return nil, err
	}
	var out []published
	for _, i := range all {
		if i.Scope != scope || i.Name == hooksName {
			continue
		}
		p, err := readOne(r, i)
		if errors.Is(err, kernel.ErrNotExist) {
			continue // removed meanwhile
		} else if err != nil {
			return nil, err
		}
		out = append(out, p)
	}
	slices.SortFunc(out, func(a, b published) int { return strings.Compare(a.Service.Name, b.Service.Name) })
	return out, nil
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
	return p, nil
}

// publish creates or changes a guard. What its sources have earned stays with it.
func (t target) publish(l *kernel.WriteLock) error {
	others, err := readPublished(l.Root, t.scope)
	if err != nil {
		return err
	}
	free := map[uint16]bool{}
	for i := range uint16(maxGuards) {
		free[i] = true
	}
	mine := -1
	for _, o := range others {
		delete(free, o.Index)
		if o.Service.Name == t.Service.Name {
			mine = int(o.Index)
		}
	}
	switch {
	case mine >= 0:
		t.Index = uint16(mine)
	case len(free) == 0:
		return fmt.Errorf("the namespace has %d guards already, which is the most", maxGuards)
	default:
		t.Index = slices.Min(slices.Collect(maps.Keys(free)))
	}
	var before *kernel.Meta
	if mine >= 0 {
		meta, err := l.Meta(guardInstance(t.scope, t.Service.Name))
		if err != nil {
			return err
		}
		before = &meta
	}
	ns, err := netns.Find(t.Netns, t.Inode)
	if err != nil {
		return err
	}
	defer ns.Close()
	state, each, err := t.maps(l, mine >= 0)
	if err != nil {
		return err
	}
	defer state.Close()
	defer each.Close()
	config, err := json.Marshal(t.published)
	if err != nil {
		return err
	}
	meta := kernel.Meta{ABI: ABI, Object: kernel.ObjectHash(_GuardBytes), Inode: t.Inode, Created: time.Now(), Version: Version, Config: config}
	meta.Cookie, _ = ns.Cookie()
	pins := kernel.Pins{Maps: map[string]*ebpf.Map{pinState: state, pinEach: each}}
	if err := l.Publish(guardInstance(t.scope, t.Service.Name), meta, pins); err != nil {
		return err
	}
	kernel.Step("guard:published")
	if err := sync(l, t.scope); err != nil {
		return errors.Join(err, t.takeBack(l, before, pins))
	}
	return nil
}

// takeBack has a guard that could not be put in place be what it was before, nil: not there. Killed before it is done,
// status says what is lacking, and the next command goes on.
func (t target) takeBack(l *kernel.WriteLock, before *kernel.Meta, pins kernel.Pins) error {
	if before == nil {
		return remove(l, t.scope, t.Service.Name)
	}
	if err := l.Publish(guardInstance(t.scope, t.Service.Name), *before, pins); err != nil {
		return err
	}
	kernel.Step("guard:taken-back")
	return sync(l, t.scope)
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

// remove takes a guard away.
func remove(l *kernel.WriteLock, scope, service string) error {
	// The programs find it until sync: killed in between, the next command does the rest.
	if err := l.Remove(guardInstance(scope, service)); err != nil {
		return err
	}
	kernel.Step("guard:removed")
	err := sync(l, scope)
	if errors.Is(err, netns.ErrGone) {
		return removeScope(l, scope)
	}
	return err
}
