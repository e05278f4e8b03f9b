// SPDX-License-Identifier: Apache-2.0

package slots

import (
	"errors"
	"fmt"

	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
)

// Reader asks for the slots of one service again and again, cheaply: its
// maps stay open. It sees the service as it was shaped when it was opened.
type Reader struct {
	root   *kernel.Root
	Pins   *kernel.Opened
	Record *record.Service
}

// NewReader reads slots of a service from maps that are open; the Reader closes them.
// The maps are at least those of [record.Service.ReaderMaps].
func NewReader(r *kernel.Root, pins *kernel.Opened, p *record.Service) *Reader {
	return &Reader{r, pins, p}
}

// Open opens a service's slots for reading. The only service of that name
// is meant: where several namespaces have one, scope tells them apart.
func Open(r *kernel.Root, scope, name string) (*Reader, error) {
	all, err := r.Instances(spec.Name)
	if err != nil {
		return nil, err
	}
	for _, i := range all {
		if i.Name != name || scope != "" && i.Scope != scope {
			continue
		}
		p, err := record.Read(r, i)
		if err != nil {
			return nil, err
		}
		pins, err := r.Open(record.EngineInstance(i.Scope, p.Engine), p.ReaderMaps()...)
		if err != nil {
			return nil, err
		}
		return &Reader{r, pins, p}, nil
	}
	return nil, fmt.Errorf("service %s: %w", name, kernel.ErrNotExist)
}

// Slots is the number of slots.
func (r *Reader) Slots() int { return r.Record.Service.Slots }

// Admitted says whether the slot's traffic reaches a member now, and who it is.
func (r *Reader) Admitted(slot int) (pid int, ok bool, err error) {
	if slot < 0 || slot >= r.Slots() {
		return 0, false, fmt.Errorf("%w: %d of %d", record.ErrNoSlot, slot, r.Slots())
	}
	s, err := r.State(slot)
	if err != nil {
		return 0, false, err
	}
	return s.PID, s.Admitted(), nil
}

// State reads a slot as status shows it.
func (r *Reader) State(slot int) (State, error) {
	if r.Pins == nil {
		return State{}, errors.New("closed")
	}
	if r.Pins.Replaced() { // an upgrade may have left these maps to nobody
		if now, err := r.root.Open(r.Pins.Instance, r.Record.ReaderMaps()...); err == nil {
			r.Pins.Close()
			r.Pins = now
		}
	}
	if err := r.follow(); err != nil {
		return State{}, err
	}
	return Read(r.Pins, r.Record, slot)
}

// follow finds the row that a slot has by now: each generation takes the other one.
func (r *Reader) follow() error {
	if r.Record.Service.Generations == nil {
		return nil
	}
	p, err := record.Read(r.root, record.Instance(r.Pins.Instance.Scope, r.Record.Service.Name))
	if err != nil {
		return err
	}
	if p.Service.Slots == r.Record.Service.Slots && len(p.Spare) == len(r.Record.Spare) {
		r.Record = p
	}
	return nil
}

// Raw is a slot as the kernel has it.
func (r *Reader) Raw(slot int) (s bpf.SteerSlot, err error) {
	err = r.Pins.Maps["slots"].Lookup(r.Record.Row(slot), &s)
	return s, err
}

// Close closes the maps.
func (r *Reader) Close() {
	r.Pins.Close()
	r.Pins = nil
}
