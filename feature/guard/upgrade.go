// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"fmt"
	"slices"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// upgradeHooks puts this weir's programs in place of another's, link by link; the guards' states stay.
func upgradeHooks(l *kernel.WriteLock, scope string) error {
	all, unreadable, err := readPublished(l.Root, scope)
	if err != nil || len(all) == 0 {
		return err
	}
	if err := unreadable.err(); err != nil {
		return err // the programs may not know its layout
	}
	h, err := openHooks(l, all[0].Ref, all[0].ID())
	if err != nil {
		return err
	}
	defer h.close()
	names, err := h.pins.Links()
	if err != nil {
		return err
	}
	var at []Hook
	for _, name := range names {
		if hook := linkHook(name); !slices.Contains(at, hook) {
			at = append(at, hook)
		}
	}
	c, err := h.programs(at...)
	if err != nil {
		return err
	}
	defer c.Close()
	return shared.Upgrade(l, hooksInstance(scope), func() error { return h.moveLinks(c, names) }, nil)
}

// linkHook is where a link is, by its name.
func linkHook(link string) Hook {
	if link == linkCgroup {
		return Cgroup
	}
	return XDP
}

func (h *hooks) moveLinks(c *kernel.Collection, names []string) error {
	for _, name := range names {
		ln, err := h.pins.Link(name)
		if err != nil {
			return err
		}
		err = kernel.MoveLink(ln, c.Programs[linkHook(name).program()])
		ln.Close()
		if err != nil {
			return fmt.Errorf("moving link %s to the new program: %w", name, err)
		}
		kernel.Step("guard:moved")
	}
	return nil
}

// recoverAll finishes what a killed command left half done, and removes guards whose namespace is gone. A guard that cannot be
// put in force is none that a command left half done: its state has the problem, and its own step of a plan fails. All the
// others can be changed meanwhile.
func recoverAll(l *kernel.WriteLock) error {
	scopes := map[string]bool{}
	all, err := l.Instances(Name)
	if err != nil {
		return err
	}
	for _, i := range all {
		scopes[i.Scope] = true
	}
	var errs []error
	for scope := range scopes {
		_, err := reconcile(l, scope)
		switch {
		case errors.Is(err, netns.ErrGone):
			err = removeScope(l, scope)
		case errors.Is(err, kernel.ErrABI):
			err = nil // the state tells of it
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// removeScope removes the guards of a namespace that is gone, readable or not.
func removeScope(l *kernel.WriteLock, scope string) error {
	return errors.Join(shared.RemoveAll(l, scope), guards.RemoveAll(l, scope))
}
