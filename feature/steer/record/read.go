// SPDX-License-Identifier: Apache-2.0

package record

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
)

// ReadAll reads the published services of a namespace's engine.
func ReadAll(r *kernel.Root, scope string, kind spec.Engine) (map[string]*Service, error) {
	all, err := r.Known(spec.Name) // a service that lost its pins keeps what the engine has of it
	if err != nil {
		return nil, err
	}
	out := map[string]*Service{}
	for _, i := range all {
		if i.Scope != scope || !kernel.ValidName(i.Name) {
			continue
		}
		p, err := Read(r, i)
		if errors.Is(err, kernel.ErrNotExist) {
			continue // removed meanwhile
		} else if err != nil {
			return nil, err
		}
		if p.Engine == kind {
			out[i.Name] = p
		}
	}
	return out, nil
}

// Read reads a service as it is pinned or, where pins of it were lost, as it was recorded.
func Read(r *kernel.Root, i kernel.Instance) (*Service, error) {
	p, err := ReadPinned(r, i)
	if errors.Is(err, kernel.ErrNotExist) {
		if was, rerr := readRecorded(r, i); rerr == nil {
			return was, nil
		}
	}
	return p, err
}

// ReadPinned reads a service from its pins alone; see Read.
func ReadPinned(r *kernel.Root, i kernel.Instance) (*Service, error) {
	o, err := r.Open(i, "service")
	if err != nil {
		return nil, err
	}
	defer o.Close()
	if err := o.Meta.RequireABI(i, ABI); err != nil {
		return nil, err
	}
	p := &Service{}
	if err := json.Unmarshal(o.Meta.Config, p); err != nil {
		return nil, fmt.Errorf("the pins of service %s: %w", i.Name, err)
	}
	p.Service.Name, p.Cookie = i.Name, o.Meta.Cookie
	p.Service = p.Service.WithDefaults() // of options that the weir that wrote it did not have
	var value bpf.SteerService
	if err := o.Maps["service"].Lookup(uint32(0), &value); err != nil {
		return nil, fmt.Errorf("the table of service %s: %w", i.Name, err)
	}
	p.Table = slices.Clone(value.Bucket[:])
	return p, nil
}

// readRecorded reads a service whose pins are damaged: from what was recorded of it, and
// from the map that its engine holds.
func readRecorded(r *kernel.Root, i kernel.Instance) (*Service, error) {
	meta, err := r.Recorded(i)
	if err == nil {
		err = meta.RequireABI(i, ABI)
	}
	if err != nil {
		return nil, err
	}
	p := &Service{Recorded: true}
	if err := json.Unmarshal(meta.Config, p); err != nil {
		return nil, fmt.Errorf("the record of service %s: %w", i.Name, err)
	}
	p.Service.Name, p.Cookie = i.Name, meta.Cookie
	p.Service = p.Service.WithDefaults()
	if p.Table = heldTable(r, i.Scope, p); p.Table == nil {
		p.Table = spec.Assign(p.Service.Slots)
		p.Rebalance()
	}
	return p, nil
}

// heldTable is the table of a service in the map that its engine holds, or nil.
func heldTable(r *kernel.Root, scope string, p *Service) []uint16 {
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
