// SPDX-License-Identifier: Apache-2.0

package feature

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// appliedABI is the version of what is pinned: JSON of a spec in a meta.
const appliedABI = 1

// Applied is the spec that weir apply leaves in the pins for the process of a feature. There is one for each network
// namespace; the methods work on the caller's.
type Applied[C any] struct {
	Feature string
}

// instanceIn is the spec's instance in a namespace.
func (a Applied[C]) instanceIn(ns *netns.Handle) kernel.Instance {
	return kernel.Instance{Scope: strconv.FormatUint(ns.Inode(), 10), Feature: a.Feature, Name: "spec"}
}

// Read returns the spec, nil if there is none.
func (a Applied[C]) Read(r *kernel.Root) (*C, error) {
	ns, err := netns.Current()
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	i := a.instanceIn(ns)
	m, err := r.Meta(i)
	if errors.Is(err, kernel.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	if err := m.RequireABI(i, appliedABI); err != nil {
		return nil, err
	}
	if cookie, err := ns.Cookie(); err == nil && m.Cookie != 0 && m.Cookie != cookie {
		return nil, nil // of a namespace that is gone, whose number this one has
	}
	c := new(C)
	if err := json.Unmarshal(m.Config, c); err != nil {
		return nil, fmt.Errorf("%s: %w", i, err)
	}
	return c, nil
}

// Publish records a spec in place of the one that is there.
func (a Applied[C]) Publish(l *kernel.WriteLock, c C) error {
	ns, err := netns.Current()
	if err != nil {
		return err
	}
	defer ns.Close()
	text, err := json.Marshal(c)
	if err != nil {
		return err
	}
	m := kernel.Meta{ABI: appliedABI, Inode: ns.Inode(), Created: time.Now(), Version: kernel.Version, Config: text}
	m.Cookie, _ = ns.Cookie() // 0 where the kernel has none
	return l.Publish(a.instanceIn(ns), m, kernel.Pins{})
}

// Remove forgets the spec. It is no error if there is none.
func (a Applied[C]) Remove(l *kernel.WriteLock) error {
	ns, err := netns.Current()
	if err != nil {
		return err
	}
	defer ns.Close()
	return gone(l.Remove(a.instanceIn(ns)))
}

// RemoveAll forgets the specs of all namespaces.
func (a Applied[C]) RemoveAll(l *kernel.WriteLock) error {
	all, err := l.Root.Instances(a.Feature)
	for _, i := range all {
		if i.Name == "spec" {
			err = errors.Join(err, gone(l.Remove(i)))
		}
	}
	return err
}

func gone(err error) error {
	if errors.Is(err, kernel.ErrNotExist) {
		return nil
	}
	return err
}

// Same reports whether two specs say the same. Positions in a file are no part of what they say.
func (Applied[C]) Same(a, b *C) bool {
	x, err := json.Marshal(a)
	y, err2 := json.Marshal(b)
	return err == nil && err2 == nil && string(x) == string(y)
}
