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

// Reader reads the slots of one service repeatedly. Its maps stay open. It keeps the number of slots of the first
// reading.
type Reader struct {
	root   *kernel.Root
	Pins   *kernel.Opened
	Record *record.Service
}

// NewReader returns a Reader over open maps, at least the maps of [record.Service.ReaderMaps]. The Reader closes them.
func NewReader(r *kernel.Root, pins *kernel.Opened, p *record.Service) *Reader {
	return &Reader{r, pins, p}
}

// Open opens a service's slots for reading. If several namespaces have a service of this name, scope selects one.
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

func (r *Reader) Slots() int { return r.Record.Service.Slots }

// Admitted reports whether a slot has an admitted member, and its PID.
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

// State reads a slot.
func (r *Reader) State(slot int) (State, error) {
	if r.Pins == nil {
		return State{}, errors.New("closed")
	}
	if r.Pins.Replaced() { // after an upgrade these maps may be unused
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

// follow reads the slot's current row again: each generation uses the other one.
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

// Raw reads a slot's row.
func (r *Reader) Raw(slot int) (s bpf.SteerSlot, err error) {
	err = r.Pins.Maps["slots"].Lookup(r.Record.Row(slot), &s)
	return s, err
}

func (r *Reader) Close() {
	r.Pins.Close()
	r.Pins = nil
}
