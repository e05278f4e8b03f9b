// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"

	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
)

// CleanStale removes the pins of namespaces that are gone, which would
// otherwise be taken for those of a later namespace with the same number.
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
		if is, err := netnsGone(l, i, kind); err == nil && is { // one that cannot be read stays
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

// netnsGone asks the link: the kernel detaches it with its namespace. Where there
// is none, a namespace is there while a process is in it, or a socket of its own
// is still in our hands.
func netnsGone(l *kernel.WriteLock, i kernel.Instance, kind spec.Engine) (bool, error) {
	if kind == spec.EngineReuseport {
		return groupsGone(l, i)
	}
	meta, _ := record.ReadMeta(l.Root, i) // without its cookie the link tells
	ln, err := l.Link(i, "lookup")
	if errors.Is(err, kernel.ErrNotExist) {
		return kernel.NetnsGone(nil, i.Scope, meta.Cookie), nil // its link was lost, or the namespace
	} else if err != nil {
		return false, err
	}
	defer ln.Close()
	return kernel.NetnsGone(ln, i.Scope, meta.Cookie), nil
}

// Recover finishes what a killed command left half done, in every namespace.
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

// recoverEngine finishes what a killed command left of an engine. One of another ABI stays as it is: status, plans and doctor tell of it.
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
