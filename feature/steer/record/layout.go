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

// ABI is the version of the map layouts in bpf/steer.h and templates.h. Every change that another version would misread
// increments it.
const ABI = 1

// flags of struct service.
const (
	flagMoved   = 1
	flagMigrate = 2 // flagGenerations, 4, is in generations.go
)

// Instances of a namespace's engines: programs and maps.
const (
	lookupName = "@lookup"
	reuseName  = "@reuse"
)

// Engines are the possible engines of a namespace.
var Engines = []spec.Engine{spec.EngineSkLookup, spec.EngineReuseport}

// Scope returns the pin scope of a network namespace: its inode number.
func Scope(ns *netns.Handle) string { return strconv.FormatUint(ns.Inode(), 10) }

// EngineInstance returns the instance of an engine.
func EngineInstance(scope string, kind spec.Engine) kernel.Instance {
	name := lookupName
	if kind == spec.EngineReuseport {
		name = reuseName
	}
	return kernel.Instance{Scope: scope, Feature: spec.Name, Name: name}
}

// Services stores the instances of services. A service has no object: its maps follow the engine's.
var Services = instances.Store[Service]{Feature: spec.Name, ABI: ABI, Is: kernel.ValidName, Ref: func(p *Service) string { return p.Netns },
	Fill: func(p *Service) error { p.Service = p.Service.WithDefaults(); return nil }} // for options newer than the meta

// EngineStore returns the store of an engine kind's instances.
func EngineStore(kind spec.Engine) instances.Store[struct{}] {
	object := bpf.SteerObject
	if kind == spec.EngineReuseport {
		object = bpf.ReuseObject
	}
	name := EngineInstance("", kind).Name
	return instances.Store[struct{}]{Feature: spec.Name, ABI: ABI, Object: func() []byte { return object }, Is: func(n string) bool { return n == name }}
}

// Shared stores the other instances, derived from the services of a namespace or of the host.
var Shared = instances.Store[struct{}]{Feature: spec.Name, ABI: ABI, Is: func(name string) bool {
	return !kernel.ValidName(name) && name != lookupName && name != reuseName
}}

// EngineKind returns the engine kind of an instance.
func EngineKind(i kernel.Instance) (kind spec.Engine, ok bool) {
	for _, k := range Engines {
		if EngineInstance(i.Scope, k) == i {
			return k, true
		}
	}
	return "", false
}

// Instance returns the instance of a service.
func Instance(scope, name string) kernel.Instance {
	return kernel.Instance{Scope: scope, Feature: spec.Name, Name: name}
}

// flagGenerations makes the program record UDP peers.
const flagGenerations = 4

// ScopeInode returns the inode number of a scope's network namespace.
func ScopeInode(scope string) (uint64, error) { return strconv.ParseUint(scope, 10, 64) }
