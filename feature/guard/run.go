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
	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// Run implements feature.Runner. It attaches guards to new interfaces and removes links of vanished
// ones. It removes guards of vanished namespaces.
func (Feature) Run(ctx context.Context, r *kernel.Root, log feature.Logger) error {
	return feature.Follower{Feature: Name, Lacks: lacks, Adopt: adopt}.Run(ctx, r, log)
}

// lacks reports whether a possible attachment is missing, or the guard's namespace is gone.
func lacks(r *kernel.Root, i kernel.Instance, watch func(ref string, id netns.ID)) (bool, error) {
	if !guards.Is(i.Name) {
		return false, nil // derived from the guards
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
	at, err := p.unattached(o, ns, interfaces(r, i.Scope))
	return len(at.lacking)+len(at.removed)+len(at.renamed) > 0, err
}

// interfaces returns the interfaces named by the guards of a namespace, or nil if a guard is
// unreadable.
func interfaces(r *kernel.Root, scope string) (out []string) {
	all, unread, err := readPublished(r, scope)
	if err != nil || len(unread) > 0 {
		return nil
	}
	for _, g := range all {
		out = append(out, g.Spec.Service.Interfaces...)
	}
	return out
}

// adopt attaches the guards of a namespace where missing, or removes them if the namespace is gone.
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
	} else if err := failed[i.Name]; err != nil { // the other guards have their own calls
		return "", err
	}
	return "attached at " + rec.Spec.Service.location(), nil
}

// unattached lists the missing attachments of a guard.
type unattached struct {
	lacking []string // interfaces without the guard
	absent  []string // missing interfaces
	removed []string // links of removed interfaces
	renamed []string // interfaces with a link, named by no guard
}

// unattached returns the missing attachments of a guard. o are the pins of @hooks, named are the
// interfaces of all guards in the namespace, or nil if they are unknown. A caller without access to a
// link relies on its pin.
func (p published) unattached(o *kernel.Opened, ns *netns.Handle, named []string) (u unattached, err error) {
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
		number, is := strings.CutPrefix(pin, linkXDP)
		index, aerr := strconv.Atoi(number)
		switch {
		case !is || aerr != nil:
		case detached(o, pin, index):
			u.removed = append(u.removed, pin)
		case named != nil:
			_ = ns.Do(func() error {
				l, err := netlink.LinkByIndex(index)
				if err == nil && !slices.Contains(named, l.Attrs().Name) {
					u.renamed = append(u.renamed, l.Attrs().Name)
				}
				return err
			})
		}
	}
	return u, err
}

// found reports whether packets find the guard. Its state must be at its index, and all its
// destinations must refer to it, at its hook. A killed command may leave a published guard without
// them. o are the pins of @hooks.
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
		return false, fmt.Errorf("read the guard states: %w", err)
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
			continue // for later fragments: shared by guards, and possibly full
		}
		var l listenLayout
		if err := o.Maps[pinListens].Lookup(k, &l); errors.Is(err, ebpf.ErrKeyNotExist) {
			return false, nil
		} else if err != nil {
			return false, fmt.Errorf("read the guarded destinations: %w", err)
		}
		for i := range v.Count {
			if !slices.Contains(l.Prefix[:min(l.Count, maxPrefixes)], v.Prefix[i]) {
				return false, nil
			}
		}
	}
	return true, nil
}

// detached reports whether a pinned link is no longer attached to an interface. The interface may
// have been removed, and another one may have its index.
func detached(o *kernel.Opened, pin string, index int) bool {
	ln, err := o.Link(pin)
	if err != nil {
		return errors.Is(err, kernel.ErrNotExist)
	}
	defer ln.Close()
	return errors.Is(kernel.XDP{Ifindex: index}.Verify(ln), kernel.ErrDetached)
}
