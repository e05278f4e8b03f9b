// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/kernel"
	"golang.org/x/sys/unix"
)

// tcFilters attaches a program to devices by tc filters. It serves kernels without tcx and hook
// clsact. tc filters have no links: a filter is found by its name. map_devices records the devices
// with a qdisc added by weir.
type tcFilters struct{}

// devicesMap is the pin of the device map: interface index → 1 if weir added the qdisc, else 0.
const devicesMap = "devices"

// tcPriority runs filters after steer's copies, which must copy packets before a filter drops them.
const tcPriority = 2

func newDevicesMap() (*ebpf.Map, error) {
	return ebpf.NewMap(&ebpf.MapSpec{Name: "filter_devices", Type: ebpf.Hash, KeySize: 4, ValueSize: 4, MaxEntries: 4096})
}

func (tcFilters) at(f Filter, index int) kernel.Clsact {
	return kernel.Clsact{Ifindex: index, Name: "weir_filter_" + f.Name, Egress: f.Direction == Egress, Priority: tcPriority}
}

func (tcFilters) attach(*instance, map[string]*ebpf.Map, *ebpf.Program) (map[string]kernel.Link, error) {
	return nil, nil
}

// known returns the devices with a filter, or with one about to be attached.
func (tcFilters) known(m *ebpf.Map) (map[int]bool, error) {
	if m == nil {
		return nil, fmt.Errorf("pin map_%s is missing: %w", devicesMap, kernel.ErrDamaged)
	}
	out := map[int]bool{}
	var index, ours uint32
	it := m.Iterate()
	for it.Next(&index, &ours) {
		out[int(index)] = ours == 1
	}
	return out, it.Err()
}

func (t tcFilters) move(s *instance, maps map[string]*ebpf.Map, prog *ebpf.Program) error {
	known, err := t.known(maps[devicesMap])
	if err != nil {
		return err
	}
	var undone undo
	for index := range known {
		tc := t.at(s.pub.Filter, index)
		err := s.ns.Do(func() error {
			id, err := tc.Program()
			if err != nil || id == 0 {
				return err
			}
			old, err := former(id)
			if err != nil {
				return err
			}
			undone.add(func() error { defer old.Close(); return s.ns.Do(func() error { return tc.Attach(old) }) })
			return tc.Attach(prog)
		})
		if err != nil {
			return undone.run(err)
		}
		kernel.Step("filter:moved")
	}
	return nil
}

func (t tcFilters) enter(s *instance, maps map[string]*ebpf.Map, prog *ebpf.Program) error {
	devices, _, err := s.devices()
	if err != nil {
		return err
	}
	m := maps[devicesMap]
	known, err := t.known(m)
	if err != nil {
		return err
	}
	var undone undo
	for _, index := range devices {
		// Register the undo before put, because put can fail between the qdisc and the filter.
		undone.add(func() error { return s.ns.Do(func() error { return t.at(s.pub.Filter, index).Detach(false) }) })
		if err := t.put(s, m, index, known, prog); err != nil {
			return undone.run(err)
		}
	}
	return nil
}

func (t tcFilters) reconcile(s *instance, prog *ebpf.Program) error {
	devices, _, err := s.devices()
	if err != nil {
		return err
	}
	m := s.pins.Maps[devicesMap]
	known, err := t.known(m)
	if err != nil {
		return err
	}
	attachments, err := t.attachments(s)
	if err != nil {
		return err
	}
	wanted := map[int]bool{}
	for _, p := range attachments {
		if p.stray {
			continue
		}
		index, there := devices[p.Interface]
		wanted[index] = there
		if !there || !p.lacks && !p.stale {
			continue
		}
		if err := t.put(s, m, index, known, prog); err != nil {
			return err
		}
	}
	for index, ours := range known {
		if wanted[index] {
			continue
		}
		if err := t.drop(s, s.pub.Filter, m, index, ours); err != nil {
			return err
		}
	}
	return t.note(s, m)
}

// note records the filters of all devices, so a [kernel.Checker] reports lost ones.
func (t tcFilters) note(s *instance, m *ebpf.Map) error {
	known, err := t.known(m)
	var all []kernel.Clsact
	for index := range known {
		all = append(all, t.at(s.pub.Filter, index))
	}
	return errors.Join(err, s.ns.Do(func() error { s.lock.NoteFilters(s.inst, all); return nil }))
}

// put attaches the filter to a device. It records the device first, so recovery finds the filter if
// the process is killed.
func (t tcFilters) put(s *instance, m *ebpf.Map, index int, known map[int]bool, prog *ebpf.Program) error {
	return s.ns.Do(func() error {
		tc := t.at(s.pub.Filter, index)
		if _, ok := known[index]; !ok {
			there, err := tc.HasQdisc()
			if err != nil {
				return err
			}
			ours := uint32(1)
			if there && !s.hasAnothers(index) {
				ours = 0
			}
			if err := m.Put(uint32(index), ours); err != nil {
				return fmt.Errorf("record device %d: %w", index, err)
			}
			kernel.Step("filter:noted")
		}
		err := tc.Attach(prog)
		if errors.Is(err, unix.ENODEV) {
			return nil // the device was removed meanwhile
		}
		return err
	})
}

// hasAnothers reports whether the qdisc of a device was added for another filter of weir. The last
// of these filters removes it.
func (s *instance) hasAnothers(index int) bool {
	all, err := s.lock.Instances(Name)
	if err != nil {
		return false
	}
	for _, i := range all {
		if i.Scope != s.inst.Scope || i == s.inst {
			continue
		}
		o, err := s.lock.Open(i, devicesMap)
		if err != nil {
			continue // of another attacher
		}
		var ours uint32
		err = o.Maps[devicesMap].Lookup(uint32(index), &ours)
		o.Close()
		if err == nil && ours == 1 {
			return true
		}
	}
	return false
}

func (t tcFilters) drop(s *instance, f Filter, m *ebpf.Map, index int, ours bool) error {
	if err := s.ns.Do(func() error { return t.at(f, index).Detach(ours) }); err != nil {
		return err
	}
	if err := m.Delete(uint32(index)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	return nil
}

func (t tcFilters) attachments(s *instance) ([]Attachment, error) {
	devices, without, err := s.devices()
	if err != nil {
		return nil, err
	}
	kind := "tc " + string(s.pub.Filter.Direction)
	var out []Attachment
	for _, name := range s.pub.Filter.Interfaces {
		index, ok := devices[name]
		if !ok {
			out = append(out, absent(kind, name, without(name)))
			continue
		}
		p := Attachment{Name: kind + " of " + name, Interface: name}
		var id uint32
		if err := s.ns.Do(func() (err error) { id, err = t.at(s.pub.Filter, index).Program(); return err }); err != nil {
			return nil, err
		}
		if err := p.check(s, id); err != nil {
			return nil, err
		}
		out = append(out, p)
	}
	known, err := t.known(s.pins.Maps[devicesMap])
	if err != nil {
		return nil, err
	}
	strays, err := s.strays(kind, slices.Sorted(maps.Keys(known)))
	return append(out, strays...), err
}

// clear removes the filters of a form. It finds devices missing from the map by the form's
// interfaces.
func (t tcFilters) clear(s *instance, form *published) error {
	known := map[int]bool{}
	m := s.pins.Maps[devicesMap]
	if m != nil {
		var err error
		if known, err = t.known(m); err != nil {
			return err
		}
	}
	was := *s
	was.pub = form
	devices, err := was.interfaces()
	if err != nil {
		return err
	}
	for _, a := range devices {
		if _, ok := known[a.Index]; !ok {
			known[a.Index] = false
		}
	}
	for index, ours := range known {
		err = errors.Join(err, s.ns.Do(func() error { return t.at(form.Filter, index).Detach(ours) }))
	}
	return err
}
