// SPDX-License-Identifier: Apache-2.0

package record

import (
	"strconv"

	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// ABI is the version of the map layouts in bpf/steer.h and templates.h. It rises with every
// change another weir would misread.
const ABI = 1

// flags of struct service.
const (
	flagMoved   = 1
	flagMigrate = 2 // flagGenerations, 4, is in generations.go
)

// Instances that hold a namespace's programs and their maps, one for each engine.
const (
	lookupName = "@lookup"
	reuseName  = "@reuse"
)

// Engines are the engines that a namespace may have.
var Engines = []spec.Engine{spec.EngineSkLookup, spec.EngineReuseport}

// Scope is the scope of the pins of a network namespace: its inode number.
func Scope(ns *netns.Handle) string { return strconv.FormatUint(ns.Inode(), 10) }

// EngineInstance names the pins of an engine of a scope.
func EngineInstance(scope string, kind spec.Engine) kernel.Instance {
	name := lookupName
	if kind == spec.EngineReuseport {
		name = reuseName
	}
	return kernel.Instance{Scope: scope, Feature: spec.Name, Name: name}
}

// EngineKind says which engine an instance is.
func EngineKind(i kernel.Instance) (kind spec.Engine, ok bool) {
	for _, k := range Engines {
		if EngineInstance(i.Scope, k) == i {
			return k, true
		}
	}
	return "", false
}

// Instance names the pins of a service.
func Instance(scope, name string) kernel.Instance {
	return kernel.Instance{Scope: scope, Feature: spec.Name, Name: name}
}

// flagGenerations has the program note UDP peers.
const flagGenerations = 4

// ScopeInode is the inode number of the network namespace of a pin directory.
func ScopeInode(scope string) (uint64, error) { return strconv.ParseUint(scope, 10, 64) }
