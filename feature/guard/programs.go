// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/guard/bpf"
	"github.com/weir-project/weir/internal/guardstate"
	"github.com/weir-project/weir/kernel"
)

// Hook is where a guard decides.
type Hook int

// Hooks. All of them decide alike.
const (
	Socket Hook = iota // one socket's own filter
	Cgroup             // whatever sockets of a cgroup are about to get
	XDP                // what comes in on an interface
)

func (h Hook) String() string { return [...]string{"socket", "cgroup", "xdp"}[h] }

func (h Hook) program() string {
	return [...]string{bpf.GuardProgGuardSocket, bpf.GuardProgGuardCgroup, bpf.GuardProgGuardXdp}[h]
}

// constants are what a program is loaded with.
type constants struct {
	netns      uint64 // cookie of the namespace whose services the cgroup program guards; 0: it cannot tell
	clockGiven bool   // tests give the time
}

// load loads the programs of some hooks, over maps that exist already.
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

// put makes a guard's maps the i-th of those that programs find. each may be nil.
func put(c *kernel.Collection, i uint32, state, each *ebpf.Map) error {
	if err := c.Maps[bpf.GuardMapGuardStates].Put(i, state); err != nil {
		return fmt.Errorf("putting a guard in place: %w", err)
	}
	if each == nil {
		return nil
	}
	if err := c.Maps[bpf.GuardMapGuardTargets].Put(i, each); err != nil {
		return fmt.Errorf("putting a guard's destinations in place: %w", err)
	}
	return nil
}

// newTargets makes the map of a guard's destinations.
func newTargets() (*ebpf.Map, error) {
	spec, err := bpf.LoadGuard()
	if err != nil {
		return nil, err
	}
	return ebpf.NewMap(spec.Maps[bpf.GuardMapGuardEach])
}
