// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// ErrNetnsGone says that no process and no name leads to a network namespace.
var ErrNetnsGone = netns.ErrGone

// CleanStale removes the pins of namespaces that are gone, which would
// otherwise be taken for those of a later namespace with the same number.
func CleanStale(l *kernel.WriteLock) error {
	all, err := l.Instances(Name)
	if err != nil {
		return err
	}
	gone := map[string]bool{}
	for _, i := range all {
		kind, ok := kindOf(i)
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
		if _, engine := kindOf(i); gone[i.Scope] && !engine {
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
func netnsGone(l *kernel.WriteLock, i kernel.Instance, kind Engine) (bool, error) {
	if kind == EngineReuseport {
		return groupsGone(l, i)
	}
	meta, err := metaOf(l.Root, i)
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

// metaOf is an instance's meta: as pinned or, where that pin was lost, as recorded.
func metaOf(r *kernel.Root, i kernel.Instance) (kernel.Meta, error) {
	m, err := r.Meta(i)
	if errors.Is(err, kernel.ErrNotExist) {
		return r.Recorded(i)
	}
	return m, err
}

// openNetns opens the namespace that ref led to.
func openNetns(ref string, id netns.ID) (*netns.Handle, error) { return netns.Find(ref, id) }

// openNetns opens the service's namespace.
func (s *ServiceState) openNetns() (*netns.Handle, error) {
	return openNetns(s.pub.Netns, netns.ID{Inode: s.Inode, Cookie: s.pub.cookie})
}

// Mend finishes what a killed command left half done, in every namespace.
func Mend(l *kernel.WriteLock) error {
	if err := CleanStale(l); err != nil {
		return err
	}
	if err := finishMove(l); err != nil {
		return err
	}
	all, err := l.Instances(Name)
	if err != nil {
		return err
	}
	for _, i := range all {
		kind, ok := kindOf(i)
		if !ok {
			continue
		}
		e, err := openEngine(l, i.Scope, kind)
		if err != nil {
			return err
		}
		dispatches, err := e.dispatches()
		e.Close()
		if err != nil {
			return err
		}
		if len(e.services) == 0 && !dispatches {
			if err := removeTemplates(l, i.Scope); err != nil {
				return err
			}
			if err := l.Remove(i); err != nil {
				return err
			}
		}
	}
	return errors.Join(syncBind(l, true), syncAllCopies(l))
}
