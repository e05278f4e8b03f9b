// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"context"
	"fmt"
	"net"
	"strings"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/handoff/lb/attachment"
	"github.com/weir-project/weir/feature/handoff/lb/bpf"
	"github.com/weir-project/weir/feature/handoff/lb/spec"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
)

// These maps are not pinned. The agent holds them.
const (
	learnedName = "lb_learned"
	roomName    = "lb_room"
	usersName   = "lb_users"
)

// PlanUpgrade implements feature.Upgrader.
func (Feature) PlanUpgrade(_ context.Context, r *kernel.Root) (plan feature.Plan, err error) {
	all, unreadable, err := store.All(r)
	plan.Stays(unreadable)
	for _, rec := range all {
		if store.Outdated(rec) {
			plan.Add(feature.Step{Verb: "upgrade", Object: "load balancer " + strings.TrimPrefix(rec.Name, spec.PinPrefix) + " of namespace " + rec.Scope,
				Detail: "programs of another weir", Do: func(_ context.Context, l *kernel.WriteLock) (string, error) { return "", upgrade(l, rec.Instance) }})
		}
	}
	return plan, err
}

// upgrade replaces another version's programs by this version's, over the same maps. A running agent continues. The metadata
// changes last. If the upgrade is killed earlier, the next one starts over. Until then each packet meets one of the two programs.
func upgrade(l *kernel.WriteLock, inst kernel.Instance) error {
	u, err := store.Open(l, inst)
	if err != nil {
		return err
	}
	defer u.Close()
	if err := u.Netns.Do(func() error { return exchange(l, u) }); err != nil {
		return err
	}
	return store.Upgrade(l, inst, func() error { return nil }, nil)
}

// exchange moves the links, or the filters before Linux 6.6. The caller is in the network namespace.
func exchange(l *kernel.WriteLock, u *instances.InUse[Options]) error {
	names, err := u.Pins.Links()
	if err != nil {
		return err
	}
	o := u.Spec.filled()
	buffer, err := net.InterfaceByName(o.BufferDevice)
	if err != nil {
		return fmt.Errorf("buffer device %s: %w: weir serve creates it again", o.BufferDevice, err)
	}
	filters := attachment.Filters(o.devices(), buffer.Index)
	at, err := attachment.Running(u.Pins, names, filters)
	if err != nil {
		return err
	}
	p, err := programs(u.Pins, at)
	if err != nil {
		return err
	}
	defer p.Close()
	for _, name := range names {
		if err := attachment.Move(u.Pins, name, p.Programs[attachment.Program(name, buffer.Index)]); err != nil {
			return err
		}
		kernel.Step("lb:moved")
	}
	if len(names) > 0 {
		return nil
	}
	for _, f := range filters {
		if err := f.Attach(p.Programs[attachment.Program(attachment.Link(f.Ifindex, f.Egress), buffer.Index)]); err != nil {
			return err
		}
	}
	l.NoteFilters(u.Instance, filters)
	return nil
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
		defer closeMaps(used)
		for _, name := range []string{learnedName, roomName, usersName} {
			if m := used[name]; m != nil {
				share[name] = m
			}
		}
	}
	return kernel.Load(spec, []string{"lb_in", "lb_again", "lb_own"}, share)
}
