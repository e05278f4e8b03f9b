// SPDX-License-Identifier: Apache-2.0

package record

import (
	"strconv"

	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
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

// Services are the instances of services. A service has no object: its maps follow the engine's.
var Services = instances.Store[Service]{Feature: spec.Name, ABI: ABI, Is: kernel.ValidName, Ref: func(p *Service) string { return p.Netns },
	Fill: func(p *Service) { p.Service = p.Service.WithDefaults() }} // options that are newer than the meta

// EngineStore are the instances of engines of a kind.
func EngineStore(kind spec.Engine) instances.Store[struct{}] {
	object := bpf.SteerObject
	if kind == spec.EngineReuseport {
		object = bpf.ReuseObject
	}
	name := EngineInstance("", kind).Name
	return instances.Store[struct{}]{Feature: spec.Name, ABI: ABI, Object: func() []byte { return object }, Is: func(n string) bool { return n == name }}
}

// Shared are the other instances: what follows from the services of a namespace or of the host.
var Shared = instances.Store[struct{}]{Feature: spec.Name, ABI: ABI, Is: func(name string) bool {
	return !kernel.ValidName(name) && name != lookupName && name != reuseName
}}

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
