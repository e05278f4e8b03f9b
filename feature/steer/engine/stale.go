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
		is, err := netnsGone(l, i, kind)
		if err != nil {
			return err
		}
		if is {
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
	meta, err := ReadMeta(l.Root, i)
	if err != nil && !errors.Is(err, kernel.ErrNotExist) {
		return false, err
	}
	ln, err := l.Link(i, "lookup")
	if errors.Is(err, kernel.ErrNotExist) {
		return kernel.NetnsGone(nil, i.Scope, meta.Cookie), nil // its link was lost, or the namespace
	} else if err != nil {
		return false, err
	}
	defer ln.Close()
	return kernel.NetnsGone(ln, i.Scope, meta.Cookie), nil
}

// ReadMeta is an instance's meta: as pinned or, where that pin was lost, as recorded.
func ReadMeta(r *kernel.Root, i kernel.Instance) (kernel.Meta, error) {
	m, err := r.Meta(i)
	if errors.Is(err, kernel.ErrNotExist) {
		return r.Recorded(i)
	}
	return m, err
}

// Recover finishes what a killed command left half done, in every namespace.
func Recover(l *kernel.WriteLock) error {
	if err := CleanStale(l); err != nil {
		return err
	}
	if err := FinishMove(l); err != nil {
		return err
	}
	all, err := l.Instances(spec.Name)
	if err != nil {
		return err
	}
	for _, i := range all {
		kind, ok := record.EngineKind(i)
		if !ok {
			continue
		}
		e, err := OpenEngine(l, i.Scope, kind)
		if err != nil {
			return err
		}
		dispatches, err := e.Dispatches()
		e.Close()
		if err != nil {
			return err
		}
		if len(e.Services) == 0 && !dispatches {
			if err := RemoveTemplates(l, i.Scope); err != nil {
				return err
			}
			if err := l.Remove(i); err != nil {
				return err
			}
		}
	}
	return errors.Join(ReconcileBind(l, true), syncAllCopies(l))
}
