// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
)

// PinnedMaps returns the names of the maps that an instance has in each version. ok is false for an instance that steering never
// publishes.
func PinnedMaps(i kernel.Instance) (names []string, ok bool) {
	if i.Feature != spec.Name || i.Scope == kernel.HostScope && i != BindInstance {
		return nil, false
	}
	switch kind, isEngine := record.EngineKind(i); {
	case i == BindInstance:
		return []string{"ports"}, true
	case i == CopyInstance(i.Scope):
		return []string{"devices", "targets"}, true
	case i.Name == TemplatesName:
		return []string{"counts", "sessions", "store"}, true
	case isEngine && kind == spec.EngineReuseport:
		return []string{"cookies", "groups", "holder", "holders", "services", "slots", "sockets", "sync", "verdicts"}, true
	case isEngine:
		return []string{"devices", "ports", "prefixes", "services", "slots", "sockets", "sync", "verdicts"}, true
	}
	return []string{"service"}, kernel.ValidName(i.Name)
}
