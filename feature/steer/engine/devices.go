// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
)

// pinDevices creates the maps of a service's devices.
func (e *Engine) pinDevices(p *record.Service) (aliases, names *ebpf.Map, err error) {
	if p.List == nil { // the change does not concern the devices
		p.List, err = record.ReadDevices(e.Lock.Root, p, e.Scope)
		if errors.Is(err, kernel.ErrNotExist) { // the service is being recovered
			p.List, err = spec.LoadDevices(p.Service.Devices)
		}
		if err != nil {
			return nil, nil, err
		}
	}
	spec, err := bpf.LoadSteer()
	if err != nil {
		return nil, nil, err
	}
	return p.List.Maps(spec)
}

// putMoved writes the slots of moved devices before the service refers to them. If the service refers to them already,
// each move takes effect with one store, for all protocols at once.
func (e *Engine) putMoved(p *record.Service) error {
	for a, slot := range p.Moves() {
		k, want := bpf.SteerDeviceKey{Service: p.ID, Addr: a.As16()}, uint32(slot)
		var have uint32
		if err := e.Pins.Maps["moved"].Lookup(k, &have); err == nil && have == want {
			continue
		}
		if err := e.Pins.Maps["moved"].Put(k, want); err != nil {
			return err
		}
		kernel.Step("steer:moved")
	}
	return nil
}

// dropMoved removes the moves of no service.
func (e *Engine) dropMoved() error {
	want := map[bpf.SteerDeviceKey]bool{}
	for _, p := range e.Services {
		for a := range p.Moves() {
			want[bpf.SteerDeviceKey{Service: p.ID, Addr: a.As16()}] = true
		}
	}
	have, err := Entries[bpf.SteerDeviceKey, uint32](e.Pins.Maps["moved"])
	if err != nil {
		return err
	}
	for k := range have {
		if want[k] || e.keeps(k.Service) {
			continue
		}
		if err := e.Pins.Maps["moved"].Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return err
		}
		kernel.Step("steer:moved")
	}
	return nil
}

// putAliases points steer_aliases at a service's own map of devices.
func (e *Engine) putAliases(p *record.Service, own *ebpf.Map) error {
	if own == nil {
		return nil
	}
	same, err := record.ContainsMap(e.Pins.Maps["aliases"], p.ID, own)
	if err != nil || same {
		return err
	}
	if err := e.Pins.Maps["aliases"].Put(p.ID, own); err != nil {
		return err
	}
	kernel.Step("steer:devices")
	return nil
}

// dropAliases removes the devices of a removed service.
func (e *Engine) dropAliases(id uint32) error {
	if err := e.Pins.Maps["aliases"].Delete(id); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	return nil
}
