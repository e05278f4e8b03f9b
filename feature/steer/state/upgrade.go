// SPDX-License-Identifier: Apache-2.0

package state

import (
	"errors"
	"fmt"

	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
)

// Outdated is an engine whose program another weir put in place.
type Outdated struct {
	Netns   string      `json:"netns"` // as the kernel names it: net:[4026531840]
	Engine  spec.Engine `json:"engine"`
	Object  string      `json:"object"`  // the beginning of the SHA-256 of the BPF object
	Version string      `json:"version"` // of the weir that put it there
	Scope   string      `json:"-"`
}

// String is the change that an upgrade makes.
func (o Outdated) String() string {
	s := fmt.Sprintf("object %s → %s", o.Object, engine.ShortHash(engine.ObjectHash(o.Engine)))
	if o.Version != kernel.Version {
		s += fmt.Sprintf(", weir %s → %s", o.Version, kernel.Version)
	}
	return s
}

// ReadOutdated lists the engines among instances that an upgrade would change, and those that cannot be read.
func ReadOutdated(r *kernel.Root, all []kernel.Instance) (out []Outdated, unread instances.Unreadable) {
	for _, i := range all {
		kind, ok := record.EngineKind(i)
		if !ok {
			continue
		}
		engines := record.EngineStore(kind)
		rec, err := engines.Read(r, i)
		if errors.Is(err, kernel.ErrNotExist) {
			continue // or damaged, which a Checker tells
		} else if err != nil {
			unread.Add(i, err)
			continue
		}
		if m := rec.Meta; engines.Outdated(rec) {
			out = append(out, Outdated{Netns: fmt.Sprintf("net:[%s]", i.Scope), Engine: kind,
				Object: engine.ShortHash(m.Object), Version: m.Version, Scope: i.Scope})
		}
	}
	return out, unread
}

// ReadUnread lists those among instances that cannot be read, without engines.
func ReadUnread(r *kernel.Root, all []kernel.Instance) (unread instances.Unreadable, err error) {
	for _, i := range all {
		switch {
		case kernel.ValidName(i.Name):
			_, err = record.Read(r, i)
		case record.Shared.Is(i.Name):
			_, err = record.Shared.Read(r, i)
		default:
			continue
		}
		if errors.Is(err, kernel.ErrUnreadable) {
			return nil, err
		}
		if err != nil && !errors.Is(err, kernel.ErrNotExist) {
			unread.Add(i, err)
		}
	}
	return unread, nil
}
