// SPDX-License-Identifier: Apache-2.0

// Package instances reads and writes instances of one kind, with a common name scheme, spec, ABI and BPF object. Package
// kernel pins and locks.
package instances

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// Store reads and writes the instances of one kind with spec S. It holds nothing open between calls.
type Store[S any] struct {
	Feature string
	ABI     uint32                          // version of the layout of its maps
	Object  func() []byte                   // the embedded BPF object; nil: there is none, or each Form has its own
	Is      func(name string) bool          // reports whether an instance name is of this kind; nil: every name is
	Ref     func(spec *S) (netnsRef string) // returns the network namespace reference in a spec; nil: there is none
	Fill    func(spec *S) error             // completes a decoded spec, and rejects an unknown form; nil: nothing to complete
}

// Record is an instance with its decoded meta.
type Record[S any] struct {
	kernel.Instance
	Meta kernel.Meta
	Spec S
	Ref  string // reference to the network namespace, if the spec has one
}

// ID returns the network namespace of the instance.
func (r Record[S]) ID() netns.ID { return r.Meta.ID() }

// Netns opens the network namespace of the instance by inode number and cookie. It returns [netns.ErrGone] if the
// namespace is gone, even if another one has its inode number.
func (r Record[S]) Netns() (*netns.Handle, error) { return netns.Find(r.Ref, r.ID()) }

// Gone reports whether the network namespace of the instance is gone.
func (r Record[S]) Gone() (bool, error) {
	if r.Scope == kernel.HostScope {
		return false, nil
	}
	ns, err := r.Netns()
	if errors.Is(err, netns.ErrGone) {
		return true, nil
	} else if err != nil {
		return false, err
	}
	return false, ns.Close()
}

// Name returns the instance with a name in a scope.
func (s Store[S]) Name(scope, name string) kernel.Instance {
	return kernel.Instance{Scope: scope, Feature: s.Feature, Name: name}
}

// Keys lists the instances, sorted by scope and name, without reading their meta.
func (s Store[S]) Keys(r *kernel.Root) ([]kernel.Instance, error) {
	all, err := r.Instances(s.Feature)
	if s.Is == nil {
		return all, err
	}
	return slices.DeleteFunc(all, func(i kernel.Instance) bool { return !s.Is(i.Name) }), err
}

// Read reads the meta of an instance. It returns [kernel.ErrNotExist] for a missing one, and [kernel.ErrABI] for another
// version.
func (s Store[S]) Read(r *kernel.Root, i kernel.Instance) (Record[S], error) {
	m, err := r.Meta(i)
	if err != nil {
		return Record[S]{Instance: i}, err
	}
	return s.Decode(i, m)
}

// Decode decodes the meta of an instance.
func (s Store[S]) Decode(i kernel.Instance, m kernel.Meta) (Record[S], error) {
	rec := Record[S]{Instance: i, Meta: m}
	if err := m.RequireABI(i, s.ABI); err != nil {
		return rec, err
	}
	if len(m.Config) > 0 {
		if err := json.Unmarshal(m.Config, &rec.Spec); err != nil {
			return rec, fmt.Errorf("decode the meta of %s: %w", i, err)
		}
	}
	if s.Fill != nil {
		if err := s.Fill(&rec.Spec); err != nil {
			return rec, fmt.Errorf("decode the meta of %s: %w", i, err)
		}
	}
	if s.Ref != nil {
		rec.Ref = s.Ref(&rec.Spec)
	}
	return rec, nil
}

// All reads all instances, and lists the unreadable ones. err is only an error of the whole root, such as
// [kernel.ErrUnreadable].
func (s Store[S]) All(r *kernel.Root) ([]Record[S], Unreadable, error) { return s.among(r, "") }

// In reads the instances of a scope, as All does.
func (s Store[S]) In(r *kernel.Root, scope string) ([]Record[S], Unreadable, error) {
	return s.among(r, scope)
}

func (s Store[S]) among(r *kernel.Root, scope string) (out []Record[S], unreadable Unreadable, err error) {
	keys, err := s.Keys(r)
	if err != nil {
		return nil, nil, err
	}
	for _, i := range keys {
		if scope != "" && i.Scope != scope {
			continue
		}
		rec, err := s.Read(r, i)
		switch {
		case err == nil:
			out = append(out, rec)
		case errors.Is(err, kernel.ErrUnreadable):
			return nil, nil, err
		case !errors.Is(err, kernel.ErrNotExist): // removed meanwhile, or damaged and reported by a Checker
			unreadable.Add(i, err)
		}
	}
	return out, unreadable, nil
}

// Outdated reports whether an instance has another BPF object than this weir's.
func (s Store[S]) Outdated(rec Record[S]) bool {
	return rec.Meta.Object != kernel.ObjectHash(s.Object())
}

// InUse is an instance with open pins and network namespace. The caller closes it.
type InUse[S any] struct {
	Record[S]
	Pins  *kernel.Opened
	Netns *netns.Handle // nil for instances of the host
}

// source is a [kernel.Root] for reading, or a [kernel.WriteLock].
type source interface {
	Open(i kernel.Instance, maps ...string) (*kernel.Opened, error)
}

// Open opens the pins of an instance and its network namespace. The pins are writable if from is a [kernel.WriteLock].
// It returns [netns.ErrGone] if the namespace is gone, even if another one has its inode number.
func (s Store[S]) Open(from source, i kernel.Instance, names ...string) (*InUse[S], error) {
	o, err := from.Open(i, names...)
	if err != nil {
		return nil, err
	}
	u := &InUse[S]{Pins: o}
	if u.Record, err = s.Decode(i, o.Meta); err == nil && i.Scope != kernel.HostScope {
		u.Netns, err = u.Record.Netns()
	}
	if err != nil {
		u.Close()
		return nil, err
	}
	return u, nil
}

// Close closes the descriptors. The pins stay.
func (u *InUse[S]) Close() {
	if u.Pins != nil {
		u.Pins.Close()
	}
	if u.Netns != nil {
		u.Netns.Close()
	}
}

// Form is the new form of an instance, for publication.
type Form[S any] struct {
	Spec   S
	Netns  *netns.Handle     // nil: an instance of the host
	Object [sha256.Size]byte // hash of the instance's own object; zero: the store's object
	Pins   kernel.Pins
}

// Meta returns the meta of a form.
func (s Store[S]) Meta(f Form[S]) (m kernel.Meta, err error) {
	m = kernel.Meta{ABI: s.ABI, Object: f.Object, Created: time.Now(), Version: kernel.Version}
	if m.Object == [sha256.Size]byte{} && s.Object != nil {
		m.Object = kernel.ObjectHash(s.Object())
	}
	if f.Netns != nil {
		id := f.Netns.ID()
		m.Inode, m.Cookie = id.Inode, id.Cookie
	}
	m.Config, err = json.Marshal(f.Spec)
	return m, err
}

// Publish pins a form over an older one of the name; see [kernel.WriteLock.Publish].
func (s Store[S]) Publish(l *kernel.WriteLock, i kernel.Instance, f Form[S]) error {
	m, err := s.Meta(f)
	if err != nil {
		return err
	}
	return l.Publish(i, m, f.Pins)
}

// Respec changes the spec of an instance. Its maps, links and programs stay. more are additional maps.
func (s Store[S]) Respec(l *kernel.WriteLock, i kernel.Instance, spec S, more map[string]*ebpf.Map) error {
	o, err := l.Open(i)
	if err != nil {
		return err
	}
	defer o.Close()
	if err := o.Meta.RequireABI(i, s.ABI); err != nil {
		return err
	}
	m := o.Meta
	m.Created, m.Version = time.Now(), kernel.Version
	if m.Config, err = json.Marshal(spec); err != nil {
		return err
	}
	return s.upgrade(l, o, m, more, func() error { return nil })
}

// Upgrade replaces another version's programs by this weir's. attach moves every attachment, or fails after undoing its
// changes. The spec, maps and links stay. more are additional maps.
func (s Store[S]) Upgrade(l *kernel.WriteLock, i kernel.Instance, attach func() error, more map[string]*ebpf.Map) error {
	o, err := l.Open(i)
	if err != nil {
		return err
	}
	defer o.Close()
	if err := o.Meta.RequireABI(i, s.ABI); err != nil {
		return err
	}
	m := o.Meta
	m.Object, m.Created, m.Version = kernel.ObjectHash(s.Object()), time.Now(), kernel.Version
	return s.upgrade(l, o, m, more, attach)
}

func (s Store[S]) upgrade(l *kernel.WriteLock, o *kernel.Opened, m kernel.Meta, more map[string]*ebpf.Map, swap func() error) error {
	names, err := o.Links()
	if err != nil {
		return err
	}
	all := map[string]*ebpf.Map{}
	maps.Copy(all, more)
	maps.Copy(all, o.Maps)
	return l.Upgrade(o.Instance, kernel.Upgrade{Meta: m, Pins: kernel.Pins{Maps: all}, Keep: names, Swap: swap})
}

// Exchange replaces an instance by another form under traffic. The links in keep stay. swap moves every attachment to
// the new programs, or fails after undoing its changes.
func (s Store[S]) Exchange(l *kernel.WriteLock, i kernel.Instance, f Form[S], keep []string, swap func() error) error {
	m, err := s.Meta(f)
	if err != nil {
		return err
	}
	return l.Upgrade(i, kernel.Upgrade{Meta: m, Pins: f.Pins, Keep: keep, Swap: swap})
}

// Remove removes an instance; see [kernel.WriteLock.Remove].
func (s Store[S]) Remove(l *kernel.WriteLock, i kernel.Instance) error { return l.Remove(i) }

// RemoveAll removes all instances of a scope, readable or not. An empty scope means all scopes.
func (s Store[S]) RemoveAll(l *kernel.WriteLock, scope string) error {
	keys, err := s.Keys(l.Root)
	for _, i := range keys {
		if scope == "" || i.Scope == scope {
			err = errors.Join(err, l.Remove(i))
		}
	}
	return err
}

// RemoveGone removes the instances without a network namespace. Unreadable instances stay.
func (s Store[S]) RemoveGone(l *kernel.WriteLock) error {
	all, _, err := s.All(l.Root)
	for _, rec := range all {
		gone, gerr := rec.Gone()
		if gone {
			gerr = s.Remove(l, rec.Instance)
		}
		err = errors.Join(err, gerr)
	}
	return err
}

// ForgetDamaged removes the records of instances without pins.
func (s Store[S]) ForgetDamaged(l *kernel.WriteLock) {
	l.ForgetDamaged(func(i kernel.Instance) bool { return i.Feature == s.Feature && (s.Is == nil || s.Is(i.Name)) })
}
