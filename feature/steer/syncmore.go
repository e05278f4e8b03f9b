// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/kernel"
)

// putMoved says where the devices of a service are that were moved, before a
// service that asks for it is there. Where one asks already, each move is a store
// of its own, for all protocols at once.
func (e *engine) putMoved(p *published) error {
	for a, slot := range p.moves() {
		k, want := bpf.SteerDeviceKey{Service: p.ID, Addr: a.As16()}, uint32(slot)
		var have uint32
		if err := e.pins.Maps["moved"].Lookup(k, &have); err == nil && have == want {
			continue
		}
		if err := e.pins.Maps["moved"].Put(k, want); err != nil {
			return err
		}
		kernel.Step("steer:moved")
	}
	return nil
}

// dropMoved forgets moves that no service has any more.
func (e *engine) dropMoved() error {
	want := map[bpf.SteerDeviceKey]bool{}
	for _, p := range e.services {
		for a := range p.moves() {
			want[bpf.SteerDeviceKey{Service: p.ID, Addr: a.As16()}] = true
		}
	}
	have, err := entries[bpf.SteerDeviceKey, uint32](e.pins.Maps["moved"])
	if err != nil {
		return err
	}
	for k := range have {
		if want[k] {
			continue
		}
		if err := e.pins.Maps["moved"].Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return err
		}
		kernel.Step("steer:moved")
	}
	return nil
}

// putAliases points steer_aliases at a service's own map of devices.
func (e *engine) putAliases(p *published, own *ebpf.Map) error {
	if own == nil {
		return nil
	}
	same, err := holdsMap(e.pins.Maps["aliases"], p.ID, own)
	if err != nil || same {
		return err
	}
	if err := e.pins.Maps["aliases"].Put(p.ID, own); err != nil {
		return err
	}
	kernel.Step("steer:devices")
	return nil
}

// holdsMap says whether an array of maps has this one at an index.
func holdsMap(outer *ebpf.Map, at uint32, inner *ebpf.Map) (bool, error) {
	info, err := inner.Info()
	if err != nil {
		return false, err
	}
	want, _ := info.ID()
	var have ebpf.MapID
	return outer.Lookup(at, &have) == nil && have == want, nil
}

// dropAliases takes the devices of a service that is gone away.
func (e *engine) dropAliases(id uint32) error {
	if err := e.pins.Maps["aliases"].Delete(id); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	return nil
}
