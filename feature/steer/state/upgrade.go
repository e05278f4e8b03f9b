// SPDX-License-Identifier: Apache-2.0

package state

import (
	"errors"
	"fmt"

	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
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

// ReadOutdated lists the engines among instances that an upgrade would change.
func ReadOutdated(r *kernel.Root, all []kernel.Instance) ([]Outdated, error) {
	var out []Outdated
	for _, i := range all {
		kind, ok := record.EngineKind(i)
		if !ok {
			continue
		}
		m, err := r.Meta(i)
		if errors.Is(err, kernel.ErrNotExist) {
			continue
		} else if err != nil {
			return nil, err
		}
		if err := m.RequireABI(i, record.ABI); err != nil {
			return nil, err
		}
		if m.Object != engine.ObjectHash(kind) {
			out = append(out, Outdated{Netns: fmt.Sprintf("net:[%s]", i.Scope), Engine: kind,
				Object: engine.ShortHash(m.Object), Version: m.Version, Scope: i.Scope})
		}
	}
	return out, nil
}
