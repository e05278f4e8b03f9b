// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

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
func lacks(r *kernel.Root, i kernel.Instance, watch func(ref string, inode uint64)) (bool, error) {
	if i.Name == hooksName {
		return false, nil // it follows from the guards
	}
	p, err := readOne(r, i)
	if err != nil {
		return false, err
	}
	ns, err := netns.Find(p.Netns, p.Inode)
	if errors.Is(err, netns.ErrGone) {
		return true, nil
	} else if err != nil {
		return false, err
	}
	defer ns.Close()
	if len(p.Service.Interfaces) > 0 {
		watch(p.Netns, p.Inode)
	}
	o, err := r.Open(hooksInstance(i.Scope), pinListens)
	if errors.Is(err, kernel.ErrNotExist) {
		return true, nil
	} else if err != nil {
		return false, err
	}
	defer o.Close()
	at, err := p.unattached(o, ns)
	return len(at.lacking)+len(at.left) > 0, err
}

// adopt attaches the guards of a namespace where they are lacking, or removes them with their namespace.
func adopt(l *kernel.WriteLock, i kernel.Instance) (string, error) {
	p, err := readOne(l.Root, i)
	if err != nil {
		return "", err
	}
	err = sync(l, i.Scope)
	if errors.Is(err, netns.ErrGone) {
		return "removed: its network namespace is gone", removeScope(l, i.Scope)
	} else if err != nil {
		return "", err
	}
	return "attached at " + p.Service.place(), nil
}

// unattached is where a guard is not attached.
type unattached struct {
	lacking []string // there, and the guard is not attached
	absent  []string // interfaces that are not there
	left    []string // links of interfaces that went
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
			index, err := ifindexOf(name)
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
				u.left = append(u.left, pin)
			}
		}
	}
	return u, err
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
