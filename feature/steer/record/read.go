// SPDX-License-Identifier: Apache-2.0

package record

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
)

// ReadAll reads the published services of a namespace's engine, and the unreadable services of every engine, because
// only their meta contains the engine.
func ReadAll(r *kernel.Root, scope string, kind spec.Engine) (map[string]*Service, instances.Unreadable, error) {
	all, err := r.Known(spec.Name) // also services without pins, because the engine may still have their maps
	if err != nil {
		return nil, nil, err
	}
	out := map[string]*Service{}
	var unread instances.Unreadable
	for _, i := range all {
		if i.Scope != scope || !kernel.ValidName(i.Name) {
			continue
		}
		p, err := Read(r, i)
		switch {
		case errors.Is(err, kernel.ErrNotExist): // removed meanwhile
		case errors.Is(err, kernel.ErrUnreadable):
			return nil, nil, err
		case err != nil:
			unread.Add(i, err)
		case p.Engine == kind:
			out[i.Name] = p
		}
	}
	return out, unread, nil
}

// Read reads a service from its pins. If pins are lost, it reads the record of the publication. It returns
// [kernel.ErrNotExist] if there is none, and [kernel.ErrDamaged] if neither pins nor record are sufficient.
func Read(r *kernel.Root, i kernel.Instance) (*Service, error) {
	p, err := readPinned(r, i)
	if !errors.Is(err, kernel.ErrNotExist) {
		return p, err
	}
	was, rerr := readRecorded(r, i)
	if !errors.Is(rerr, kernel.ErrNotExist) {
		return was, rerr
	}
	if !r.Has(i) {
		return nil, err
	}
	if p, err = readPinned(r, i); errors.Is(err, kernel.ErrNotExist) && r.Has(i) { // otherwise it was published or removed meanwhile
		if m, merr := r.Meta(i); merr == nil {
			if _, merr = decodeService(i, m); merr != nil {
				return nil, merr // of another version
			}
		}
		return nil, fmt.Errorf("%s: %w, and there is no record of it: run weir remove steer, then weir apply", i, kernel.ErrDamaged)
	}
	return p, err
}

// ReadMeta returns an instance's meta from its pin. If the pin is lost, it returns the recorded meta.
func ReadMeta(r *kernel.Root, i kernel.Instance) (kernel.Meta, error) {
	m, err := r.Meta(i)
	if errors.Is(err, kernel.ErrNotExist) {
		return r.Recorded(i)
	}
	return m, err
}

// readPinned reads a service from its pins only.
func readPinned(r *kernel.Root, i kernel.Instance) (*Service, error) {
	o, err := r.Open(i, "service")
	if err != nil {
		return nil, err
	}
	defer o.Close()
	p, err := decodeService(i, o.Meta)
	if err != nil {
		return nil, err
	}
	var value bpf.SteerService
	if err := o.Maps["service"].Lookup(uint32(0), &value); err != nil {
		return nil, fmt.Errorf("read the table of service %s: %w", i.Name, err)
	}
	if p.Table = tableOf(value, p.Service.Slots); p.Table == nil {
		return nil, fmt.Errorf("%s: its table names slots that it has not: %w: run weir remove steer, then weir apply", i, kernel.ErrDamaged)
	}
	return p, nil
}

// tableOf returns the slots of the buckets, or nil if another writer has put other numbers there.
func tableOf(value bpf.SteerService, slots int) []uint16 {
	if slices.ContainsFunc(value.Bucket[:], func(slot uint16) bool { return int(slot) >= slots }) {
		return nil
	}
	return slices.Clone(value.Bucket[:])
}

// decodeService decodes the meta of a service.
func decodeService(i kernel.Instance, m kernel.Meta) (*Service, error) {
	rec, err := Services.Decode(i, m)
	if err != nil {
		return nil, err
	}
	p := &rec.Spec
	if p.Service.Seed == nil || p.Service.Slots != len(p.Rows) || !slices.Contains(Engines, p.Engine) {
		return nil, fmt.Errorf("%s: its meta describes no service", i)
	}
	p.Service.Name, p.Cookie = i.Name, m.Cookie
	return p, nil
}

// readRecorded reads a service with damaged pins: the configuration from its record, the table from the engine's map.
func readRecorded(r *kernel.Root, i kernel.Instance) (*Service, error) {
	meta, err := r.Recorded(i)
	if err != nil {
		return nil, err
	}
	p, err := decodeService(i, meta)
	if err != nil {
		return nil, err
	}
	p.Recorded = true
	if p.Table = engineTable(r, i.Scope, p); p.Table == nil {
		p.Table = spec.Assign(p.Service.Slots)
		p.Rebalance()
	}
	return p, nil
}

// engineTable returns a service's table from the engine's maps, or nil.
func engineTable(r *kernel.Root, scope string, p *Service) []uint16 {
	o, err := r.Open(EngineInstance(scope, p.Engine), "services")
	if err != nil {
		return nil
	}
	defer o.Close()
	var id ebpf.MapID
	if o.Maps["services"].Lookup(p.ID, &id) != nil {
		return nil
	}
	m, err := ebpf.NewMapFromID(id)
	if err != nil {
		return nil
	}
	defer m.Close()
	var value bpf.SteerService
	if m.Lookup(uint32(0), &value) != nil {
		return nil
	}
	return tableOf(value, p.Service.Slots)
}
