// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"fmt"

	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/kernel"
)

// SlotReader asks for the slots of one service again and again, cheaply: its
// maps stay open. It sees the service as it was shaped when it was opened.
type SlotReader struct {
	root *kernel.Root
	pins *kernel.Opened
	pub  *published
}

// readerMaps are the maps of an engine that tell of slots.
func (p *published) readerMaps() []string {
	maps := []string{"slots", "sockets", "verdicts"}
	if p.Service.Generations != nil {
		maps = append(maps, "gens")
	}
	return maps
}

// OpenSlots opens a service's slots for reading. The only service of that name
// is meant: where several namespaces have one, scope tells them apart.
func OpenSlots(r *kernel.Root, scope, name string) (*SlotReader, error) {
	all, err := r.Instances(Name)
	if err != nil {
		return nil, err
	}
	for _, i := range all {
		if i.Name != name || scope != "" && i.Scope != scope {
			continue
		}
		p, err := readService(r, i)
		if err != nil {
			return nil, err
		}
		pins, err := r.Open(engineInstance(i.Scope, p.Engine), p.readerMaps()...)
		if err != nil {
			return nil, err
		}
		return &SlotReader{r, pins, p}, nil
	}
	return nil, fmt.Errorf("service %s: %w", name, kernel.ErrNotExist)
}

// Slots is the number of slots.
func (r *SlotReader) Slots() int { return r.pub.Service.Slots }

// Admitted says whether the slot's traffic reaches a member now, and who it is.
func (r *SlotReader) Admitted(slot int) (pid int, ok bool, err error) {
	if slot < 0 || slot >= r.Slots() {
		return 0, false, fmt.Errorf("%w: %d of %d", ErrNoSlot, slot, r.Slots())
	}
	s, err := r.state(slot)
	if err != nil {
		return 0, false, err
	}
	return s.PID, s.Admitted(), nil
}

// Verdicts reads a slot's counters, by "udp" and "tcp".
func (r *SlotReader) Verdicts(slot int) (map[string]Verdicts, error) {
	s, err := r.state(slot)
	return s.Verdicts, err
}

func (r *SlotReader) state(slot int) (SlotState, error) {
	if r.pins == nil {
		return SlotState{}, errors.New("closed")
	}
	if r.pins.Replaced() { // an upgrade may have left these maps to nobody
		if now, err := r.root.Open(r.pins.Instance, r.pub.readerMaps()...); err == nil {
			r.pins.Close()
			r.pins = now
		}
	}
	if err := r.follow(); err != nil {
		return SlotState{}, err
	}
	return readSlot(r.pins, r.pub, slot)
}

// follow finds the row that a slot has by now: each generation takes the other one.
func (r *SlotReader) follow() error {
	if r.pub.Service.Generations == nil {
		return nil
	}
	p, err := readService(r.root, serviceInstance(r.pins.Instance.Scope, r.pub.Service.Name))
	if err != nil {
		return err
	}
	if p.Service.Slots == r.pub.Service.Slots && len(p.Spare) == len(r.pub.Spare) {
		r.pub = p
	}
	return nil
}

// raw is a slot as the kernel has it.
func (r *SlotReader) raw(slot int) (s bpf.SteerSlot, err error) {
	err = r.pins.Maps["slots"].Lookup(r.pub.row(slot), &s)
	return s, err
}

// Close closes the maps.
func (r *SlotReader) Close() {
	r.pins.Close()
	r.pins = nil
}
