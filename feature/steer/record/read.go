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

// ReadAll reads the published services of a namespace's engine. Services that cannot be read are listed, whatever their engine:
// only their meta would tell it.
func ReadAll(r *kernel.Root, scope string, kind spec.Engine) (map[string]*Service, instances.Unreadable, error) {
	all, err := r.Known(spec.Name) // a service that lost its pins keeps what the engine has of it
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

// Read reads a service as it is pinned or, where pins of it were lost, as it was recorded. It returns [kernel.ErrNotExist] where
// there is none, and [kernel.ErrDamaged] where neither pins nor record are enough.
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
	if p, err = readPinned(r, i); errors.Is(err, kernel.ErrNotExist) && r.Has(i) { // else it was published, or removed, meanwhile
		if m, merr := r.Meta(i); merr == nil {
			if _, merr = decodeService(i, m); merr != nil {
				return nil, merr // another weir's
			}
		}
		return nil, fmt.Errorf("%s: %w, and there is no record of it", i, kernel.ErrDamaged)
	}
	return p, err
}

// ReadMeta is an instance's meta: as pinned or, where that pin was lost, as recorded.
func ReadMeta(r *kernel.Root, i kernel.Instance) (kernel.Meta, error) {
	m, err := r.Meta(i)
	if errors.Is(err, kernel.ErrNotExist) {
		return r.Recorded(i)
	}
	return m, err
}

// readPinned reads a service from its pins alone; see Read.
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
		return nil, fmt.Errorf("the table of service %s: %w", i.Name, err)
	}
	p.Table = slices.Clone(value.Bucket[:])
	return p, nil
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

// readRecorded reads a service whose pins are damaged: from what was recorded of it, and
// from the map that its engine holds.
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

// engineTable is the table of a service in the map that its engine holds, or nil.
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
	return slices.Clone(value.Bucket[:])
}
