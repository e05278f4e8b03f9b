// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"strconv"

	"github.com/weir-project/weir/internal/netns"
)

// ID returns the ID of an instance's namespace.
func (m Meta) ID() netns.ID { return netns.ID{Inode: m.Inode, Cookie: m.Cookie} }

// ScopeOf returns the scope of a network namespace's instances. nil means the host.
func ScopeOf(ns *netns.Handle) string {
	if ns == nil {
		return HostScope
	}
	return strconv.FormatUint(ns.Inode(), 10)
}

// OpenNetns opens the namespace of a published instance. It returns [netns.ErrGone] if the namespace is gone, even if
// another namespace has its inode number.
func (r *Root) OpenNetns(i Instance) (*netns.Handle, error) {
	return netns.OfScope("", i.Scope, r.netnsCookie(i))
}

// OpenScope opens the namespace of a scope's instances, as OpenNetns does. ref may name it.
func (r *Root) OpenScope(ref, scope string) (*netns.Handle, error) {
	return netns.OfScope(ref, scope, r.cookieIn(scope))
}

// netnsCookie returns the cookie of an instance's namespace from its meta, or from its record if meta is lost; 0 if
// unknown.
func (r *Root) netnsCookie(i Instance) uint64 {
	m, err := r.Meta(i)
	if err != nil {
		m, _ = r.Recorded(i)
	}
	return m.Cookie
}

// maxAsked bounds the instances of a scope asked for the cookie.
const maxAsked = 8

// cookieIn returns the cookie of a scope's namespace, or 0 if unknown. All instances of a scope share it, because taking
// the lock removes instances of a former namespace.
func (r *Root) cookieIn(scope string) uint64 {
	all, _ := r.instancesIn(scope, "")
	for _, i := range all[:min(len(all), maxAsked)] {
		if c := r.netnsCookie(i); c != 0 {
			return c
		}
	}
	return 0
}

// passedOn reports whether another namespace has the inode number of a scope. Its pins then belong to nobody: readers
// skip them, and the next writer removes them. It is false if unknown.
func (r *Root) passedOn(scope string) bool {
	return scope != HostScope && othersNow(scope, r.cookieIn)
}

// othersNow reports whether the namespace with the number of a scope has another cookie than recorded. It calls was
// last.
func othersNow(scope string, was func(scope string) uint64) bool {
	ns, err := netns.OfScope("", scope, 0)
	if err != nil {
		return false // gone without a successor: each feature removes its own instances
	}
	defer ns.Close()
	now, err := ns.Cookie()
	if err != nil {
		return false
	}
	then := was(scope)
	return then != 0 && then != now
}

// PassedOn lists the instances of gone namespaces whose inode numbers other namespaces have. [Root.Instances] omits
// them, and taking the lock removes them.
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

// OnSweep registers f to remove a feature's state outside the pins. f is called after the removal of an instance of
// PassedOn. Call OnSweep at initialization.
func OnSweep(f func(Instance)) { leftovers = append(leftovers, f) }

// sweep removes the instances of PassedOn. Their programs and filters ended with their namespaces.
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
