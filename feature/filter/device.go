// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/kernel"
	"golang.org/x/sys/unix"
)

// deviceLinks attaches a program to devices by tcx and XDP links. The links are authoritative. Each
// interface has one, pinned as link_dev<ifindex>.
type deviceLinks struct{}

// at returns the kernel attachment for a device.
func (deviceLinks) at(f Filter, device string, index int) kernel.Attachment {
	if f.Hook.xdp() {
		return kernel.XDP{Ifindex: index, Device: device, Generic: f.Hook == HookXDPGeneric}
	}
	return f.tcx(device, index)
}

func (f Filter) tcx(device string, index int) kernel.TCX {
	return kernel.TCX{Ifindex: index, Device: device, Egress: f.Direction == Egress, Order: f.Order.Order}
}

func (d deviceLinks) attach(s *instance, _ map[string]*ebpf.Map, prog *ebpf.Program) (map[string]kernel.Link, error) {
	out := map[string]kernel.Link{}
	devices, _, err := s.devices()
	for _, name := range s.pub.Filter.Interfaces {
		index, ok := devices[name]
		if !ok || err != nil {
			continue
		}
		var ln kernel.Link
		if ln, err = d.attachOne(s, name, index, prog); err == nil {
			out[devicePin(index)] = ln
		}
	}
	return out, err
}

func (d deviceLinks) attachOne(s *instance, name string, index int, prog *ebpf.Program) (ln kernel.Link, err error) {
	err = s.ns.Do(func() error {
		ln, err = d.at(s.pub.Filter, name, index).Attach(prog)
		return err
	})
	return ln, err
}

func (deviceLinks) move(s *instance, _ map[string]*ebpf.Map, prog *ebpf.Program) error {
	pins, err := s.pins.Links()
	if err != nil {
		return err
	}
	return moveLinks(s, slices.DeleteFunc(pins, func(p string) bool { return !isDevicePin(p) }), prog)
}

// moveLinks makes links run another program, one after the other. It skips links of removed
// devices.
func moveLinks(s *instance, pins []string, prog *ebpf.Program) error {
	var undone undo
	for _, pin := range pins {
		ln, err := s.pins.Link(pin)
		if err != nil {
			return undone.run(err)
		}
		defer ln.Close()
		id, err := kernel.LinkProgram(ln)
		if err != nil {
			return undone.run(err)
		}
		old, err := former(id)
		if err != nil {
			return undone.run(err)
		}
		defer old.Close()
		if err := kernel.MoveLink(ln, prog); errors.Is(err, unix.ENOLINK) {
			continue // the device is gone
		} else if err != nil {
			return undone.run(fmt.Errorf("update link %s of %s: %w", pin, s.inst, err))
		}
		kernel.Step("filter:moved")
		undone.add(func() error { return kernel.MoveLink(ln, old) })
	}
	return nil
}

func (d deviceLinks) reconcile(s *instance, prog *ebpf.Program) error {
	attachments, err := d.attachments(s)
	if err != nil {
		return err
	}
	devices, _, err := s.devices()
	if err != nil {
		return err
	}
	wanted := map[string]bool{}
	for _, p := range attachments {
		if p.pin == "" {
			continue
		}
		wanted[p.pin] = true
		if !p.lacks {
			continue
		}
		if err := s.lock.RemoveLink(s.inst, p.pin); err != nil { // a link of a former device with the same index
			return err
		}
		ln, err := d.attachOne(s, p.Interface, devices[p.Interface], prog)
		if err != nil {
			return err
		}
		err = s.lock.AddLink(s.inst, p.pin, ln)
		ln.Close()
		if err != nil {
			return err
		}
		kernel.Step("filter:attached")
	}
	pins, err := s.pins.Links()
	for _, pin := range pins {
		if isDevicePin(pin) && !wanted[pin] {
			err = errors.Join(err, s.lock.RemoveLink(s.inst, pin))
		}
	}
	return err
}

func (d deviceLinks) attachments(s *instance) ([]Attachment, error) {
	devices, without, err := s.devices()
	if err != nil {
		return nil, err
	}
	var out []Attachment
	for _, name := range s.pub.Filter.Interfaces {
		index, ok := devices[name]
		if !ok {
			out = append(out, absent(d.kind(s.pub.Filter), name, without(name)))
			continue
		}
		a := d.at(s.pub.Filter, name, index)
		p := Attachment{Name: a.String(), Interface: name, pin: devicePin(index)}
		if err := p.checkLink(s, a); err != nil {
			return nil, err
		}
		out = append(out, p)
	}
	pins, err := s.pins.Links()
	if err != nil {
		return nil, err
	}
	var at []int
	for _, pin := range pins {
		if index, err := strconv.Atoi(strings.TrimPrefix(pin, "dev")); err == nil && isDevicePin(pin) {
			at = append(at, index)
		}
	}
	strays, err := s.strays(d.kind(s.pub.Filter), at)
	return append(out, strays...), err
}

// kind describes the hook.
func (d deviceLinks) kind(f Filter) string {
	return d.at(f, "", 0).(interface{ Kind() string }).Kind()
}

// checkLink updates the attachment from its pinned link.
func (p *Attachment) checkLink(s *instance, a kernel.Attachment) error {
	ln, err := s.pins.Link(p.pin)
	switch {
	case errors.Is(err, kernel.ErrNotExist):
		p.lack()
		return nil
	case errors.Is(err, os.ErrPermission):
		p.Attached = true // pinned; only the owner may open links
		return nil
	case err != nil:
		return err
	}
	defer ln.Close()
	if err := a.Verify(ln); errors.Is(err, kernel.ErrDetached) {
		p.lack()
		return nil
	} else if err != nil {
		return err
	}
	id, err := kernel.LinkProgram(ln)
	if err != nil {
		return err
	}
	p.program = id
	if err := p.position(s, a, ln); err != nil && !permission(err) {
		return err
	}
	return p.check(s, id)
}

// position reads the program's position among others and compares it with the configured order.
func (p *Attachment) position(s *instance, a kernel.Attachment, ln kernel.Link) error {
	return s.ns.Do(func() error {
		at, ok, err := kernel.PositionAt(a, ln)
		if err != nil || !ok {
			return err
		}
		p.Position = &at
		if o := s.pub.Filter.Order; !o.Kept(at) {
			p.misplaced, p.Problem = true, fmt.Sprintf("position is %s, want %s: weir apply moves it", at, o)
		}
		return nil
	})
}

func (deviceLinks) enter(*instance, map[string]*ebpf.Map, *ebpf.Program) error { return nil }

func (deviceLinks) clear(s *instance, _ *published) error { return s.dropLinks() }

// dropLinks detaches all links.
func (s *instance) dropLinks() error {
	if s.pins == nil {
		return nil
	}
	pins, err := s.pins.Links()
	for _, pin := range pins {
		err = errors.Join(err, s.lock.RemoveLink(s.inst, pin))
	}
	return err
}
