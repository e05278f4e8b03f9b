// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/guard/bpf"
	"github.com/weir-project/weir/internal/guardstate"
	"github.com/weir-project/weir/kernel"
)

// Hook is the kernel hook of a guard.
type Hook int

// Hooks. All of them decide alike.
const (
	Socket Hook = iota // the filter of one socket
	Cgroup             // packets to any socket of a cgroup
	XDP                // packets received by an interface
)

func (h Hook) String() string { return [...]string{"socket", "cgroup", "xdp"}[h] }

func (h Hook) program() string {
	return [...]string{bpf.GuardProgGuardSocket, bpf.GuardProgGuardCgroup, bpf.GuardProgGuardXdp}[h]
}

// constants are a program's load-time constants.
type constants struct {
	netns      uint64 // cookie of the namespace of the cgroup program's services; 0: unsupported
	clockGiven bool   // tests set the time
}

// load loads the programs of some hooks, using existing maps.
func load(c constants, share map[string]*ebpf.Map, hooks ...Hook) (*kernel.Collection, error) {
	spec, err := bpf.LoadGuard()
	if err != nil {
		return nil, err
	}
	if err := spec.Variables[bpf.GuardVarGuardNetns].Set(c.netns); err != nil {
		return nil, err
	}
	if c.clockGiven {
		if err := spec.Variables[bpf.GuardVarGuardClockGiven].Set(uint32(1)); err != nil {
			return nil, err
		}
	}
	if cpus, err := ebpf.PossibleCPU(); err != nil {
		return nil, err
	} else if cpus > guardstate.CounterSets {
		if err := spec.Variables[bpf.GuardVarGuardCountersShared].Set(uint32(1)); err != nil {
			return nil, err
		}
	}
	var names []string
	for _, h := range hooks {
		names = append(names, h.program())
	}
	return kernel.Load(spec, names, share)
}

// put stores a guard's maps at index i for the programs. each may be nil.
func put(c *kernel.Collection, i uint32, state, each *ebpf.Map) error {
	if err := c.Maps[bpf.GuardMapGuardStates].Put(i, state); err != nil {
		return fmt.Errorf("store the guard's state: %w", err)
	}
	if each == nil {
		return nil
	}
	if err := c.Maps[bpf.GuardMapGuardTargets].Put(i, each); err != nil {
		return fmt.Errorf("store the guard's destinations: %w", err)
	}
	return nil
}

// newTargets creates the map of a guard's destinations.
func newTargets() (*ebpf.Map, error) {
	spec, err := bpf.LoadGuard()
	if err != nil {
		return nil, err
	}
	return ebpf.NewMap(spec.Maps[bpf.GuardMapGuardEach])
}
