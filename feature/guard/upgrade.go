// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"fmt"
	"slices"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// upgradeHooks replaces another weir's programs by this weir's, link by link. The guards' states
// stay.
func upgradeHooks(l *kernel.WriteLock, scope string) error {
	all, unreadable, err := readPublished(l.Root, scope)
	if err != nil || len(all) == 0 {
		return err
	}
	if err := unreadable.err(); err != nil {
		return err // the programs may not support its layout
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

// linkHook returns the hook of a link by its name.
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
			return fmt.Errorf("update link %s to the new program: %w", name, err)
		}
		kernel.Step("guard:moved")
	}
	return nil
}

// recoverAll completes changes of killed commands, and removes guards of removed namespaces. It
// ignores guards it cannot put into effect: the state reports their problem, and their own step of
// a plan fails. Other guards can be changed meanwhile.
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
			err = nil // reported by the state
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// removeScope removes the guards of a removed namespace, readable or not.
func removeScope(l *kernel.WriteLock, scope string) error {
	return errors.Join(shared.RemoveAll(l, scope), guards.RemoveAll(l, scope))
}
