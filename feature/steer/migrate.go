// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"fmt"
	"reflect"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/kernel"
)

// copyExits gives the new exit program its own list of whom to watch.
func (e *engine) copyExits(old *kernel.Opened) error {
	all, err := entries[steerExitKey, uint32](old.Maps["exits"])
	if err != nil {
		return fmt.Errorf("reading exits: %w", err)
	}
	for k, row := range all {
		if err := e.pins.Maps["exits"].Put(k, row); err != nil {
			return fmt.Errorf("copying exits: %w", err)
		}
	}
	return nil
}

// copySlots copies rows until none changed while it did. Only exits change them:
// who may write otherwise waits for the lock. The older program of exits runs
// first, so that a row is either seen changed here, or changed by the new one.
func (e *engine) copySlots(old *kernel.Opened) error {
	var have []steerSlot
	for {
		now, err := readRows(old.Maps["slots"])
		if err != nil {
			return err
		}
		changed := false
		for row, s := range now {
			if have == nil && s == (steerSlot{}) || have != nil && s == have[row] {
				continue
			}
			if err := e.pins.Maps["slots"].Put(uint32(row), s); err != nil {
				return fmt.Errorf("copying slots: %w", err)
			}
			changed = true
		}
		if !changed {
			return nil
		}
		have = now
	}
}

// lateExits is for a process whose exit was on its way while the programs
// changed places: the older one withdrew its slots where nobody looks now.
func (e *engine) lateExits(old *kernel.Opened) error {
	if !e.renewed(old, "slots") {
		return nil
	}
	was, err := readRows(old.Maps["slots"])
	if err != nil {
		return err
	}
	now, err := readRows(e.pins.Maps["slots"])
	if err != nil {
		return err
	}
	for row, s := range now {
		w := was[row]
		if slotState(w.State) == stateExited && slotState(s.State) == stateAdmitted && w.Tgid == s.Tgid && w.Start == s.Start {
			if err := e.setState(uint32(row), stateExited); err != nil {
				return err
			}
		}
	}
	return nil
}

// readRows reads all slots, of this layout or an older one.
func readRows(m *ebpf.Map) ([]steerSlot, error) {
	// A batch wants a slice of values of their own size.
	value := reflect.ArrayOf(int(m.ValueSize()), reflect.TypeFor[byte]())
	values := reflect.MakeSlice(reflect.SliceOf(value), int(m.MaxEntries()), int(m.MaxEntries()))
	var cursor ebpf.MapBatchCursor
	n, err := m.BatchLookup(&cursor, make([]uint32, m.MaxEntries()), values.Interface(), nil)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) { // how the kernel says "the last ones"
		return nil, fmt.Errorf("reading slots: %w", err)
	}
	out := make([]steerSlot, n)
	for row := range out {
		if err := kernel.Pad(values.Index(row).Bytes(), &out[row]); err != nil {
			return nil, fmt.Errorf("reading slots: %w", err)
		}
		if m.ValueSize() == slotSizeABI1 && out[row] != (steerSlot{}) {
			out[row].At = ownPlaces
		}
	}
	return out, nil
}

// slotSizeABI1 is the size of struct slot before sockets could be elsewhere than
// at their endpoints' places.
const slotSizeABI1 = 24

// fromABI1 fills in what a service's pins of ABI 1 do not say: there was one
// engine, and rows were one behind the other.
func (p *published) fromABI1(v *steerService) {
	p.Engine, p.Why = EngineSkLookup, "it was steered so by a weir that had no other"
	for slot := range uint32(p.Service.Slots) {
		p.Rows = append(p.Rows, v.FirstRow+slot)
	}
}

// renewed says whether a map of this engine is another than the old engine's.
func (e *engine) renewed(old *kernel.Opened, name string) bool {
	a, b := e.pins.Maps[name], old.Maps[name]
	if a == nil || b == nil {
		return false
	}
	x, err := a.Info()
	y, err2 := b.Info()
	if err != nil || err2 != nil {
		return true
	}
	i, _ := x.ID()
	j, _ := y.ID()
	return i != j
}

// putService has steer_services hold a map of a service that is not pinned yet.
func (e *engine) putService(p *published) error {
	m, err := newInner(p)
	if err != nil {
		return err
	}
	defer m.Close()
	return e.pins.Maps["services"].Put(p.ID, m)
}

// carryOwn takes the maps over that only user space knows, copied where their
// layout changed, and sets the mark where the services' directories must follow.
// The caller closes the maps that it returns, also after an error.
func (e *engine) carryOwn(old *kernel.Opened) (made []*ebpf.Map, err error) {
	for _, spec := range ownMaps(e.kind, roomOf(e.pins.Maps)) {
		name := strings.TrimPrefix(spec.Name, "steer_")
		was := old.Maps[name]
		if was != nil && spec.Compatible(was) == nil {
			e.pins.Maps[name] = was
			continue
		}
		m, err := ebpf.NewMap(spec)
		if err != nil {
			return made, fmt.Errorf("making the map %s: %w", spec.Name, err)
		}
		made = append(made, m)
		e.pins.Maps[name] = m
		if was != nil && was.Type() == ebpf.Array {
			if err := copyArray(m, was); err != nil {
				return made, fmt.Errorf("copying the map %s: %w", spec.Name, err)
			}
		}
	}
	if old.Meta.ABI != engineABI(e.pins.Maps) { // ports say more, too, where something is bound
		err = e.mark(true)
	}
	return made, err
}

// copyArray copies the elements of a small array into one that may be longer, in
// elements that may be.
func copyArray(to, from *ebpf.Map) error {
	for k := range min(to.MaxEntries(), from.MaxEntries()) {
		value, err := from.LookupBytes(k)
		if err != nil {
			return err
		}
		whole := make([]byte, to.ValueSize())
		copy(whole, value)
		if err := to.Put(k, whole); err != nil {
			return err
		}
	}
	return nil
}
