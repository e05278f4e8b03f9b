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

// Outdated is an engine with the program of another weir version.
type Outdated struct {
	Netns   string      `json:"netns"` // kernel name: net:[4026531840]
	Engine  spec.Engine `json:"engine"`
	Object  string      `json:"object"`  // first bytes of the SHA-256 of the BPF object
	Version string      `json:"version"` // of the weir that loaded it
	Scope   string      `json:"-"`
}

// String describes the change by an upgrade.
func (o Outdated) String() string {
	s := fmt.Sprintf("object %s → %s", o.Object, engine.ShortHash(engine.ObjectHash(o.Engine)))
	if o.Version != kernel.Version {
		s += fmt.Sprintf(", weir %s → %s", o.Version, kernel.Version)
	}
	return s
}

// ReadOutdated returns the engines that an upgrade would change, and the unreadable engines.
func ReadOutdated(r *kernel.Root, all []kernel.Instance) (out []Outdated, unread instances.Unreadable) {
	for _, i := range all {
		kind, ok := record.EngineKind(i)
		if !ok {
			continue
		}
		engines := record.EngineStore(kind)
		rec, err := engines.Read(r, i)
		if errors.Is(err, kernel.ErrNotExist) {
			continue // or damaged: a Checker reports it
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

// ReadUnread returns the unreadable instances other than engines.
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
