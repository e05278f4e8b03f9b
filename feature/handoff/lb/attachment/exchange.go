// SPDX-License-Identifier: Apache-2.0

package attachment

import (
	"fmt"
	"net"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/handoff/lb/bpf"
	"github.com/weir-project/weir/kernel"
)

// LearnedName and the other names are of maps without a pin. The agent holds them.
const (
	LearnedName = "lb_learned"
	roomName    = "lb_room"
	usersName   = "lb_users"
)

// Exchange loads this version's programs over the maps of a load balancer, and moves its links to
// them. Before Linux 6.6 it replaces the filters of its devices and of the buffer device, and
// returns them.
func Exchange(pins *kernel.Opened, devices []string, bufferDevice string) ([]kernel.Clsact, error) {
	names, err := pins.Links()
	if err != nil {
		return nil, err
	}
	buffer, err := net.InterfaceByName(bufferDevice)
	if err != nil {
		return nil, fmt.Errorf("buffer device %s: %w: weir serve creates it again", bufferDevice, err)
	}
	filters := Filters(devices, buffer.Index)
	at, err := Running(pins, names, filters)
	if err != nil {
		return nil, err
	}
	p, err := programs(pins, at)
	if err != nil {
		return nil, err
	}
	defer p.Close()
	for _, name := range names {
		if err := Move(pins, name, p.Programs[Program(name, buffer.Index)]); err != nil {
			return nil, err
		}
		kernel.Step("lb:moved")
	}
	if len(names) > 0 {
		return nil, nil
	}
	for _, f := range filters {
		if err := f.Attach(p.Programs[Program(Link(f.Ifindex, f.Egress), buffer.Index)]); err != nil {
			return nil, err
		}
	}
	return filters, nil
}

// programs loads this version's programs over the pinned maps and the running program's unpinned ones.
func programs(pins *kernel.Opened, running uint32) (*kernel.Collection, error) {
	spec, err := bpf.LoadLB()
	if err != nil {
		return nil, err
	}
	share := map[string]*ebpf.Map{}
	for pin, m := range pins.Maps {
		share["lb_"+pin] = m
	}
	if running != 0 {
		used, err := kernel.OpenProgramMaps(running)
		if err != nil {
			return nil, err
		}
		defer func() {
			for _, m := range used {
				m.Close()
			}
		}()
		for _, name := range []string{LearnedName, roomName, usersName} {
			if m := used[name]; m != nil {
				share[name] = m
			}
		}
	}
	return kernel.Load(spec, []string{"lb_in", "lb_again", "lb_own"}, share)
}
