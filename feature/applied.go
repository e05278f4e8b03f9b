// SPDX-License-Identifier: Apache-2.0

package feature

import (
	"encoding/json"
	"errors"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/users"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
)

// appliedABI is the version of the pinned form: a spec as JSON in a meta.
const appliedABI = 1

const appliedName = "spec"

// Applied is the spec that weir apply pins for a feature's process. Each network namespace has one. The methods use the
// caller's namespace unless noted.
type Applied[C any] struct {
	Feature string
}

func (a Applied[C]) store() instances.Store[C] {
	return instances.Store[C]{Feature: a.Feature, ABI: appliedABI, Is: func(name string) bool { return name == appliedName }}
}

// here names the spec's instance in the caller's network namespace. The caller closes ns.
func (a Applied[C]) here() (i kernel.Instance, ns *netns.Handle, err error) {
	if ns, err = netns.Current(); err != nil {
		return i, nil, err
	}
	return a.store().Name(kernel.ScopeOf(ns), appliedName), ns, nil
}

// Read returns the spec, or nil if there is none.
func (a Applied[C]) Read(r *kernel.Root) (*C, error) {
	i, ns, err := a.here()
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	rec, err := a.store().Read(r, i)
	if errors.Is(err, kernel.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	if !ns.Is(rec.ID()) {
		return nil, nil // it belongs to a gone namespace with this number
	}
	return &rec.Spec, nil
}

// State returns the spec, and the unreadable specs of all network namespaces. The spec is nil if it is missing or
// unreadable.
func (a Applied[C]) State(r *kernel.Root) (*C, instances.Unreadable, error) {
	_, unreadable, err := a.store().All(r)
	if err != nil {
		return nil, nil, err
	}
	c, err := a.Read(r)
	if stays, serr := a.Stays(unreadable); stays || serr != nil {
		err = serr
	}
	return c, unreadable, err
}

// Stays reports whether the spec is among the unreadable ones.
func (a Applied[C]) Stays(unreadable instances.Unreadable) (bool, error) {
	i, ns, err := a.here()
	if err != nil {
		return false, err
	}
	defer ns.Close()
	return unreadable.Has(i), nil
}

// Publish records a spec in place of the current one.
func (a Applied[C]) Publish(l *kernel.WriteLock, c C) error {
	i, ns, err := a.here()
	if err != nil {
		return err
	}
	defer ns.Close()
	return a.store().Publish(l, i, instances.Form[C]{Spec: c, Netns: ns})
}

// Remove removes the spec. A missing spec is not an error.
func (a Applied[C]) Remove(l *kernel.WriteLock) error {
	i, ns, err := a.here()
	if err != nil {
		return err
	}
	defer ns.Close()
	return gone(l.Remove(i))
}

// RemoveAll removes the specs of all namespaces.
func (a Applied[C]) RemoveAll(l *kernel.WriteLock) error {
	return a.store().RemoveAll(l, "")
}

func gone(err error) error {
	if errors.Is(err, kernel.ErrNotExist) {
		return nil
	}
	return err
}

// RemoveGone removes the specs of gone network namespaces.
func (a Applied[C]) RemoveGone(l *kernel.WriteLock) error { return a.store().RemoveGone(l) }

// RemedyGone is the remedy for an instance of a gone network namespace without an entry in the file.
const RemedyGone = "run weir apply to remove its remains; a new namespace needs its own apply"

// Gone returns the specs of gone network namespaces. Only root and weir serve can detect them: other users get none.
func (a Applied[C]) Gone(r *kernel.Root) (out []instances.Record[C], err error) {
	if !users.SeesAll() {
		return nil, nil
	}
	all, _, err := a.store().All(r)
	for _, rec := range all {
		if gone, gerr := rec.Gone(); gone {
			out = append(out, rec)
		} else {
			err = errors.Join(err, gerr)
		}
	}
	return out, err
}

// Same reports whether two specs are equal, apart from their positions in a file.
func (Applied[C]) Same(a, b *C) bool {
	x, err := json.Marshal(a)
	y, err2 := json.Marshal(b)
	return err == nil && err2 == nil && string(x) == string(y)
}

// IsApplied reports whether an instance is a spec.
func IsApplied(i kernel.Instance) bool { return i.Name == appliedName }
