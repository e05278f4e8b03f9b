// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/hook"
)

// renewGroups attaches this version's program to every group of engine sk_reuseport, one by one. Both programs use the
// same maps, so a packet may meet either. After an error the changed groups get their old program back.
func (e *Engine) renewGroups() error {
	groups, err := e.groups()
	if err != nil {
		return err
	}
	ns, err := e.openNetns()
	if errors.Is(err, slots.ErrNetnsGone) {
		return nil // its groups are gone too
	} else if err != nil {
		return err
	}
	defer ns.Close()
	done := map[GroupKey]*ebpf.Program{} // previous programs, kept open so they are not unloaded with their last group
	defer func() {
		for _, was := range done {
			was.Close()
		}
	}()
	for k, v := range groups {
		if k.Proto == 0 || v.Leaving != 0 {
			continue
		}
		if was, err := ebpf.NewProgramFromID(ebpf.ProgramID(v.Program)); err == nil {
			done[k] = was
		}
		if err := e.renewGroup(ns, k, v); err != nil {
			for k, was := range done {
				err = errors.Join(err, e.attachGroup(ns, k, groups[k], was))
			}
			return err
		}
		kernel.Step("steer:group renewed")
	}
	return nil
}

func (e *Engine) renewGroup(ns *netns.Handle, k GroupKey, v GroupValue) error {
	prog, err := LoadGroupProgram(e.Pins, v)
	if err != nil {
		return err
	}
	defer prog.Close()
	return e.attachGroup(ns, k, v, prog)
}

// attachGroup attaches a program and records its id.
func (e *Engine) attachGroup(ns *netns.Handle, k GroupKey, v GroupValue, prog *ebpf.Program) error {
	attached := false
	err := withGroup(ns, k, v.UID, func(g hook.ReuseportGroup) error {
		attached = true
		return g.Attach(prog)
	})
	if err != nil || !attached { // a group without sockets will get a new program when it forms again
		return err
	}
	info, err := prog.Info()
	if err != nil {
		return err
	}
	id, _ := info.ID()
	v.Program = uint32(id)
	return e.Pins.Maps["groups"].Put(k, v)
}
