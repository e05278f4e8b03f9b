// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"fmt"
	"maps"
	"slices"
	"strconv"

	"github.com/weir-project/weir/feature/reroute/liveness/bpf"
	"github.com/weir-project/weir/internal/dump"
	"github.com/weir-project/weir/kernel"
)

// hasTCX reports whether the kernel has tcx. Tests override it.
var hasTCX = func() bool { return kernel.TCXLink.Check() == nil }

// deviceHook is an attachment of a program at a device.
type deviceHook struct {
	at      kernel.TCX
	program string
}

// hooks returns the needed attachments by the names of their links.
func (s *scopeInstance) hooks(places map[string]location) map[string]deviceHook {
	want := map[string]deviceHook{}
	for i, l := range s.loops {
		want[linkTick+strconv.Itoa(l.exit)] = deviceHook{kernel.TCX{Ifindex: l.exit, Device: exitName(i)}, bpf.LivenessProgLivenessTick}
	}
	for _, session := range s.p.Config.Sessions {
		if p, there := places[session.Name]; there && session.filled().sends() {
			want[linkReturn+strconv.Itoa(p.device)] = deviceHook{kernel.TCX{Ifindex: p.device, Device: session.Device}, bpf.LivenessProgLivenessReturn}
			want[linkLeave+strconv.Itoa(p.device)] = deviceHook{kernel.TCX{Ifindex: p.device, Device: session.Device, Egress: true}, bpf.LivenessProgLivenessLeave}
		}
	}
	return want
}

// attach attaches missing programs and detaches unneeded ones. With anew it also replaces the attached ones.
func (s *scopeInstance) attach(places map[string]location, anew bool) error {
	want := s.hooks(places)
	if !hasTCX() {
		return s.filters(want, anew)
	}
	have, err := s.pins.Links()
	if err != nil {
		return err
	}
	for _, name := range have {
		h, wanted := want[name]
		if wanted && s.attached(name, h.at) == nil {
			delete(want, name)
			if anew {
				err = s.move(name, h.program)
			}
		} else {
			err = s.lock.RemoveLink(instance(s.scope), name)
		}
		if err != nil {
			return err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(want)) {
		prog, err := s.program(want[name].program)
		if err != nil {
			return err
		}
		ln, err := want[name].at.Attach(prog)
		if err != nil {
			return err
		}
		err = s.lock.AddLink(instance(s.scope), name, ln)
		ln.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

// attached returns an error unless a pinned link is attached at the given place.
func (s *scopeInstance) attached(name string, at kernel.Attachment) error {
	ln, err := s.pins.Link(name)
	if err != nil {
		return err
	}
	defer ln.Close()
	return at.Verify(ln)
}

func (s *scopeInstance) move(name, program string) error {
	prog, err := s.program(program)
	if err != nil {
		return err
	}
	ln, err := s.pins.Link(name)
	if err != nil {
		return err
	}
	defer ln.Close()
	if err := kernel.MoveLink(ln, prog); err != nil {
		return fmt.Errorf("moving link %s to the new program: %w", name, err)
	}
	kernel.Step("liveness:moved")
	return nil
}

// filters is attach for kernels without tcx.
func (s *scopeInstance) filters(want map[string]deviceHook, anew bool) error {
	used := map[kernel.Clsact]bool{}
	for _, h := range want {
		f := kernel.Clsact{Ifindex: h.at.Ifindex, Name: filterName, Egress: h.at.Egress}
		used[f] = true
		if there, err := f.Attached(); err == nil && there && !anew {
			continue
		}
		prog, err := s.program(h.program)
		if err != nil {
			return err
		}
		if err := f.Attach(prog); err != nil {
			return err
		}
	}
	all, err := dump.LinkList()
	if err != nil {
		return fmt.Errorf("listing devices: %w", err)
	}
	for _, l := range all {
		for _, egress := range []bool{true, false} {
			f := kernel.Clsact{Ifindex: l.Attrs().Index, Name: filterName, Egress: egress}
			if there, err := f.Attached(); err != nil || !there || used[f] {
				continue
			}
			if err := f.Detach(true); err != nil {
				return err
			}
		}
	}
	s.lock.NoteFilters(instance(s.scope), slices.Collect(maps.Keys(used)))
	return nil
}
