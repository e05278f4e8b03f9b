// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
)

// PinnedMaps implements feature.Recorded. Engines and services of earlier versions have fewer maps than today's.
func (Feature) PinnedMaps(i kernel.Instance) (names []string, ok bool) {
	if i.Feature != spec.Name || i.Scope == kernel.HostScope && i != engine.BindInstance {
		return nil, false
	}
	switch kind, isEngine := record.EngineKind(i); {
	case i == engine.BindInstance:
		return []string{"ports"}, true
	case i == engine.CopyInstance(i.Scope):
		return []string{"devices", "targets"}, true
	case i.Name == engine.TemplatesName:
		return []string{"counts", "sessions", "store"}, true
	case isEngine && kind == spec.EngineReuseport:
		return []string{"cookies", "groups", "holder", "holders", "services", "slots", "sockets", "sync", "verdicts"}, true
	case isEngine:
		return []string{"devices", "ports", "prefixes", "services", "slots", "sockets", "sync", "verdicts"}, true
	}
	return []string{"service"}, kernel.ValidName(i.Name)
}
