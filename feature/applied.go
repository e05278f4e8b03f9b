// SPDX-License-Identifier: Apache-2.0

package feature

import (
	"encoding/json"
	"errors"
	"os"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
)

// appliedABI is the version of what is pinned: JSON of a spec in a meta.
const appliedABI = 1

const appliedName = "spec"

// Applied is the spec that weir apply leaves in the pins for the process of a feature. There is one for each network
// namespace; the methods work on the caller's.
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

// Read returns the spec, nil if there is none.
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
		return nil, nil // of a namespace that is gone, whose number this one has
	}
	return &rec.Spec, nil
}

// State returns the spec, nil if there is none or it cannot be read, and the specs of all network namespaces that cannot be read.
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

// Stays tells whether the spec is among those that cannot be read.
func (a Applied[C]) Stays(unreadable instances.Unreadable) (bool, error) {
	i, ns, err := a.here()
	if err != nil {
		return false, err
	}
	defer ns.Close()
	return unreadable.Has(i), nil
}

// Publish records a spec in place of the one that is there.
func (a Applied[C]) Publish(l *kernel.WriteLock, c C) error {
	i, ns, err := a.here()
	if err != nil {
		return err
	}
	defer ns.Close()
	return a.store().Publish(l, i, instances.Form[C]{Spec: c, Netns: ns})
}

// Remove forgets the spec. It is no error if there is none.
func (a Applied[C]) Remove(l *kernel.WriteLock) error {
	i, ns, err := a.here()
	if err != nil {
		return err
	}
	defer ns.Close()
	return gone(l.Remove(i))
}

// RemoveAll forgets the specs of all namespaces.
func (a Applied[C]) RemoveAll(l *kernel.WriteLock) error {
	return a.store().RemoveAll(l, "")
}

func gone(err error) error {
	if errors.Is(err, kernel.ErrNotExist) {
		return nil
	}
	return err
}

// RemoveGone forgets the specs of network namespaces that are gone.
func (a Applied[C]) RemoveGone(l *kernel.WriteLock) error { return a.store().RemoveGone(l) }

// RemedyGone is what becomes of an instance of a network namespace that is gone, and that no file names.
const RemedyGone = "the next weir apply removes what is left of it; a new namespace needs an apply of its own"

// Gone returns the specs whose network namespace is gone. Other users than root cannot tell: for them it returns none.
func (a Applied[C]) Gone(r *kernel.Root) (out []instances.Record[C], err error) {
	if os.Geteuid() != 0 {
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

// Same reports whether two specs say the same. Positions in a file are no part of what they say.
func (Applied[C]) Same(a, b *C) bool {
	x, err := json.Marshal(a)
	y, err2 := json.Marshal(b)
	return err == nil && err2 == nil && string(x) == string(y)
}
