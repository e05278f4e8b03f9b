// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// Run implements feature.Runner: it attaches guards to interfaces that come, lets go of those that went, and removes the
// guards of namespaces that are gone.
func (Feature) Run(ctx context.Context, r *kernel.Root, log feature.Logger) error {
	return feature.Follower{Feature: Name, Lacks: lacks, Adopt: adopt}.Run(ctx, r, log)
}

// lacks says whether a guard is not attached where it could be, or its namespace is gone.
func lacks(r *kernel.Root, i kernel.Instance, watch func(ref string, id netns.ID)) (bool, error) {
	if !guards.Is(i.Name) {
		return false, nil // it follows from the guards
	}
	rec, err := guards.Read(r, i)
	if err != nil {
		return false, err
	}
	p := rec.Spec
	ns, err := rec.Netns()
	if errors.Is(err, netns.ErrGone) {
		return true, nil
	} else if err != nil {
		return false, err
	}
	defer ns.Close()
	if len(p.Service.Interfaces) > 0 {
		watch(rec.Ref, rec.ID())
	}
	o, err := r.Open(hooksInstance(i.Scope), pinListens, pinStates)
	if errors.Is(err, kernel.ErrNotExist) {
		return true, nil
	} else if err != nil {
		return false, err
	}
	defer o.Close()
	mine, err := r.Open(i, pinState)
	if err != nil {
		return false, err
	}
	defer mine.Close()
	if found, err := p.found(o, mine.Maps[pinState]); err != nil || !found {
		return true, err
	}
	at, err := p.unattached(o, ns)
	return len(at.lacking)+len(at.removed) > 0, err
}

// adopt attaches the guards of a namespace where they are lacking, or removes them with their namespace.
func adopt(l *kernel.WriteLock, i kernel.Instance) (string, error) {
	rec, err := guards.Read(l.Root, i)
	if err != nil {
		return "", err
	}
	failed, err := reconcile(l, i.Scope)
	if errors.Is(err, netns.ErrGone) {
		return "removed: its network namespace is gone", removeScope(l, i.Scope)
	} else if err != nil {
		return "", err
	} else if err := failed[i.Name]; err != nil { // of others, their own turn tells
		return "", err
	}
	return "attached at " + rec.Spec.Service.location(), nil
}

// unattached is where a guard is not attached.
type unattached struct {
	lacking []string // there, and the guard is not attached
	absent  []string // interfaces that are not there
	removed []string // links of interfaces that went
}

// unattached says where a guard is not attached; o are the pins of @hooks. Who may not ask a link believes its pin.
func (p published) unattached(o *kernel.Opened, ns *netns.Handle) (u unattached, err error) {
	links, err := o.Links()
	if err != nil {
		return u, err
	}
	if len(p.Service.Interfaces) == 0 {
		if !slices.Contains(links, linkCgroup) {
			u.lacking = append(u.lacking, "its sockets")
		}
		return u, nil
	}
	err = ns.Do(func() error {
		for _, name := range p.Service.Interfaces {
			index, err := interfaceIndex(name)
			if errors.Is(err, errNoInterface) {
				u.absent = append(u.absent, name)
				continue
			} else if err != nil {
				return err
			}
			pin := fmt.Sprint(linkXDP, index)
			if !slices.Contains(links, pin) || detached(o, pin, index) {
				u.lacking = append(u.lacking, name)
			}
		}
		return nil
	})
	for _, pin := range links {
		if number, is := strings.CutPrefix(pin, linkXDP); is {
			if index, err := strconv.Atoi(number); err == nil && detached(o, pin, index) {
				u.removed = append(u.removed, pin)
			}
		}
	}
	return u, err
}

// found says whether packets find a guard: its state is in its place among the namespace's, and all its destinations
// lead there, at its hook. A command that was killed leaves one published that nothing leads to. o are the pins of @hooks.
func (p published) found(o *kernel.Opened, state *ebpf.Map) (bool, error) {
	info, err := state.Info()
	if err != nil {
		return false, err
	}
	id, _ := info.ID()
	var there uint32
	if err := o.Maps[pinStates].Lookup(uint32(p.Index), &there); errors.Is(err, ebpf.ErrKeyNotExist) {
		return false, nil
	} else if err != nil {
		return false, fmt.Errorf("reading which guards are in place: %w", err)
	}
	if ebpf.MapID(there) != id {
		return false, nil
	}
	want, err := listens(p.destinations())
	if err != nil {
		return false, err
	}
	for k, v := range want {
		if k.Port == 0 {
			continue // of later fragments: guards share it, and it may have no room
		}
		var l listenLayout
		if err := o.Maps[pinListens].Lookup(k, &l); errors.Is(err, ebpf.ErrKeyNotExist) {
			return false, nil
		} else if err != nil {
			return false, fmt.Errorf("reading what is guarded: %w", err)
		}
		for i := range v.Count {
			if !slices.Contains(l.Prefix[:l.Count], v.Prefix[i]) {
				return false, nil
			}
		}
	}
	return true, nil
}

// detached says whether a pinned link no longer attaches anything to an interface: it went, and another may have come
// that has its number.
func detached(o *kernel.Opened, pin string, index int) bool {
	ln, err := o.Link(pin)
	if err != nil {
		return errors.Is(err, kernel.ErrNotExist)
	}
	defer ln.Close()
	return errors.Is(kernel.XDP{Ifindex: index}.Verify(ln), kernel.ErrDetached)
}
