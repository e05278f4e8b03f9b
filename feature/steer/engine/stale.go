// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"

	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
)

// CleanStale removes the pins of removed namespaces. Otherwise a later namespace with the same inode number would
// inherit them.
func CleanStale(l *kernel.WriteLock) error {
	all, err := l.Instances(spec.Name)
	if err != nil {
		return err
	}
	gone := map[string]bool{}
	for _, i := range all {
		kind, ok := record.EngineKind(i)
		if !ok {
			continue
		}
		if is, err := netnsGone(l, i, kind); err == nil && is { // an unreadable instance remains
			gone[i.Scope] = true
			if err := l.Remove(i); err != nil {
				return err
			}
		}
	}
	for _, i := range all {
		if _, engine := record.EngineKind(i); gone[i.Scope] && !engine {
			if err := l.Remove(i); err != nil {
				return err
			}
		}
	}
	return nil
}

// netnsGone reports whether the namespace of an engine is gone. The kernel detaches the link with its namespace. An
// engine without a link has a namespace while a process is in it or weir's maps contain one of its sockets.
func netnsGone(l *kernel.WriteLock, i kernel.Instance, kind spec.Engine) (bool, error) {
	if kind == spec.EngineReuseport {
		return groupsGone(l, i)
	}
	meta, _ := record.ReadMeta(l.Root, i) // without a cookie the link decides
	ln, err := l.Link(i, "lookup")
	if errors.Is(err, kernel.ErrNotExist) {
		return kernel.NetnsGone(nil, i.Scope, meta.Cookie), nil // the link or the namespace was lost
	} else if err != nil {
		return false, err
	}
	defer ln.Close()
	return kernel.NetnsGone(ln, i.Scope, meta.Cookie), nil
}

// Recover completes the changes of a killed command in every namespace.
func Recover(l *kernel.WriteLock) error {
	if err := CleanStale(l); err != nil {
		return err
	}
	errs := []error{FinishMove(l)}
	all, err := l.Instances(spec.Name)
	if err != nil {
		return err
	}
	for _, i := range all {
		kind, ok := record.EngineKind(i)
		if !ok {
			continue
		}
		errs = append(errs, recoverEngine(l, i, kind))
	}
	return errors.Join(append(errs, ReconcileBind(l, true), reconcileAllCopies(l))...)
}

// recoverEngine completes the change of one engine. An engine of another ABI remains unchanged: status, plans and
// doctor report it.
func recoverEngine(l *kernel.WriteLock, i kernel.Instance, kind spec.Engine) error {
	e, err := OpenEngine(l, i.Scope, kind)
	if errors.Is(err, kernel.ErrABI) {
		return nil
	} else if err != nil {
		return err
	}
	dispatches, err := e.Dispatches()
	e.Close()
	if err != nil || dispatches || !e.Idle() {
		return err
	}
	if err := RemoveTemplates(l, i.Scope); err != nil {
		return err
	}
	return l.Remove(i)
}
