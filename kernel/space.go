// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"strconv"

	"github.com/weir-project/weir/internal/netns"
)

// ID is the namespace of an instance.
func (m Meta) ID() netns.ID { return netns.ID{Inode: m.Inode, Cookie: m.Cookie} }

// ScopeOf is the scope of a network namespace's instances; nil stands for the host.
func ScopeOf(ns *netns.Handle) string {
	if ns == nil {
		return HostScope
	}
	return strconv.FormatUint(ns.Inode(), 10)
}

// OpenNetns opens the namespace of a published instance. It returns [netns.ErrGone] where it is gone, also if another
// namespace has its inode number now.
func (r *Root) OpenNetns(i Instance) (*netns.Handle, error) {
	return netns.OfScope("", i.Scope, r.netnsCookie(i))
}

// OpenScope opens the namespace of a scope's instances, as OpenNetns does. ref may lead to it.
func (r *Root) OpenScope(ref, scope string) (*netns.Handle, error) {
	return netns.OfScope(ref, scope, r.cookieIn(scope))
}

// netnsCookie is the cookie of an instance's namespace: as pinned or, where that pin was lost, as recorded. 0 if unknown.
func (r *Root) netnsCookie(i Instance) uint64 {
	m, err := r.Meta(i)
	if err != nil {
		m, _ = r.Recorded(i)
	}
	return m.Cookie
}

// maxAsked is of how many instances of a scope the cookie is asked, until one knows it.
const maxAsked = 8

// cookieIn is the cookie of a scope's namespace, 0 if unknown: all its instances have one, since taking the lock removes
// those of a former namespace.
func (r *Root) cookieIn(scope string) uint64 {
	all, _ := r.instancesIn(scope, "")
	for _, i := range all[:min(len(all), maxAsked)] {
		if c := r.netnsCookie(i); c != 0 {
			return c
		}
	}
	return 0
}

// passedOn tells whether the inode number of a scope is another namespace's now. All that is pinned there belongs to
// nobody then: nothing reads it, and the next writer removes it. It is false where nobody can tell.
func (r *Root) passedOn(scope string) bool {
	return scope != HostScope && othersNow(scope, r.cookieIn)
}

// othersNow tells whether a scope is the number of a namespace with another cookie than was, which is asked last.
func othersNow(scope string, was func(scope string) uint64) bool {
	ns, err := netns.OfScope("", scope, 0)
	if err != nil {
		return false // gone, and its number is nobody's: each feature removes what is its own
	}
	defer ns.Close()
	now, err := ns.Cookie()
	if err != nil {
		return false
	}
	then := was(scope)
	return then != 0 && then != now
}

// PassedOn lists the instances of namespaces that are gone, and whose inode numbers others have now. [Root.Instances]
// leaves them out; taking the lock removes them.
func (r *Root) PassedOn() (out []Instance, err error) {
	scopes, err := r.names(r.path)
	for _, s := range scopes {
		if !r.passedOn(s) {
			continue
		}
		of, err := r.instancesIn(s, "")
		if err != nil {
			return nil, err
		}
		out = append(out, of...)
	}
	return out, err
}

var leftovers []func(Instance)

// OnSweep registers f, which removes what a feature has outside the pins of an instance. It is called when the instance
// was removed since its namespace is gone and the number another's. Call it at initialization.
func OnSweep(f func(Instance)) { leftovers = append(leftovers, f) }

// sweep removes what is pinned of namespaces whose numbers are others' now. Their programs and filters went with them.
func (l *WriteLock) sweep() error {
	all, err := l.PassedOn()
	for _, i := range all {
		err = errors.Join(err, l.Remove(i))
		for _, f := range leftovers {
			f(i)
		}
	}
	return err
}
