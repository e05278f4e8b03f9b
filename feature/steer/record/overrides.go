// SPDX-License-Identifier: Apache-2.0

package record

import (
	"bytes"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
)

// Overrides is what a service's pins keep beside its configuration: what operators
// changed while it ran, which outlives every apply until they take it back.
type Overrides struct {
	Devices  *spec.DeviceFile     `json:"devices,omitempty"`  // the file as it was when it was read
	Moved    map[netip.Addr]int   `json:"moved,omitempty"`    // device to slot
	Placed   map[int]PlacedBucket `json:"placed,omitempty"`   // bucket to slot
	Drained  []int                `json:"drained,omitempty"`  // slots that get no bucket for now
	Home     []byte               `json:"home,omitempty"`     // the table before the first of them was drained
	Bypassed bool                 `json:"bypassed,omitempty"` // no packet is steered

	List *spec.DeviceList `json:"-"` // of Devices
}

// PlacedBucket is a bucket that was moved by hand.
type PlacedBucket struct {
	To   int `json:"to"`
	From int `json:"from"` // whose it is otherwise
}

// Clone copies the overrides, so that a change leaves the former record as it is.
func (v Overrides) Clone() Overrides {
	v.Moved, v.Placed = maps.Clone(v.Moved), maps.Clone(v.Placed)
	v.Drained, v.Home = slices.Clone(v.Drained), slices.Clone(v.Home)
	return v
}

// IsDrained says whether an operator drained the slot.
func (v Overrides) IsDrained(slot int) bool { return slices.Contains(v.Drained, slot) }

// Moves are the moves of devices that hold now: a drained slot gets none, and
// they come back to it when it is undrained.
func (p *Service) Moves() map[netip.Addr]int {
	out := map[netip.Addr]int{}
	for a, slot := range p.Moved {
		if p.Service.By.KeepsDevices() && slot < p.Service.Slots && !p.IsDrained(slot) {
			out[a] = slot
		}
	}
	return out
}

// weights are the slots' effective ones.
func (p *Service) weights() (weights []int, total int) {
	weights = make([]int, p.Service.Slots)
	for slot := range weights {
		w, ok := p.Service.Weights[slot]
		if !ok {
			w = 1
		}
		if p.IsDrained(slot) {
			w = 0
		}
		weights[slot] = w
		total += w
	}
	return weights, total
}

// Shape gives p the table that follows from that of old, which may be nil, and
// what operators changed about old. As few buckets move as can.
func (p *Service) Shape(old *Service) {
	if old == nil {
		p.Table = spec.Assign(p.Service.Slots)
		if len(p.Service.Weights) > 0 {
			p.Rebalance()
		}
		return
	}
	file, list := p.Devices, p.List
	p.Overrides = old.Overrides.Clone()
	p.Devices, p.List = file, list
	p.DropGone()
	p.Table = slices.Clone(old.Table)
	before, _ := old.weights()
	if after, _ := p.weights(); !slices.Equal(before, after) {
		p.Rebalance()
	}
}

// DropGone forgets what was changed about slots that there are no more.
func (p *Service) DropGone() {
	slots := p.Service.Slots
	maps.DeleteFunc(p.Moved, func(_ netip.Addr, slot int) bool { return slot >= slots })
	maps.DeleteFunc(p.Placed, func(_ int, to PlacedBucket) bool { return to.To >= slots })
	p.Drained = slices.DeleteFunc(p.Drained, func(slot int) bool { return slot >= slots })
	if _, total := p.weights(); total == 0 {
		p.Drained = nil // nobody would be left
	}
}

// Rebalance gives each slot its share. Buckets of a slot that was drained go back
// to it, and those placed by hand stay where they were put.
func (p *Service) Rebalance() {
	weights, _ := p.weights()
	if len(p.Drained) == 0 && fair(p.Home, weights) {
		for b, slot := range p.Home {
			p.Table[b] = uint16(slot)
		}
	} else {
		p.Table = spec.Rebalance(returnHome(p.Table, p.Home, weights), p.Service.Slots, weights...)
	}
	for b, to := range p.Placed {
		if p.IsDrained(to.To) {
			continue
		}
		if int(p.Table[b]) != to.To {
			to.From = int(p.Table[b])
			p.Placed[b] = to
			p.Table[b] = uint16(to.To)
		}
	}
	if len(p.Drained) == 0 {
		p.Home = nil
	}
}

// fair says whether a table gives every slot its share, as near as can be.
func fair(home []byte, weights []int) bool {
	held, total := make([]int, len(weights)), 0
	for _, slot := range home {
		if int(slot) >= len(held) {
			return false
		}
		held[slot]++
	}
	for _, w := range weights {
		total += w
	}
	for slot, n := range held {
		if least := spec.Buckets * weights[slot] / total; n != least && n != least+1 {
			return false
		}
	}
	return len(home) == spec.Buckets
}

// returnHome gives slots that lack buckets those that they had before one of them
// was drained, so that most devices come back to the collector that knows them.
func returnHome(table []uint16, home []byte, weights []int) []uint16 {
	if len(home) != len(table) {
		return table
	}
	out := slices.Clone(table)
	held := make([][]int, len(weights))
	for b, slot := range table {
		if int(slot) < len(held) {
			held[slot] = append(held[slot], b)
		}
	}
	share := spec.Shares(held, len(weights), weights)
	count := make([]int, len(weights))
	for slot := range held {
		count[slot] = len(held[slot])
	}
	for _, b := range spec.Permutation {
		from, to := int(table[b]), int(home[b])
		if from == to || to >= len(weights) || count[to] >= share[to] || from < len(weights) && count[from] <= share[from] {
			continue
		}
		out[b] = uint16(to)
		count[to]++
		if from < len(weights) {
			count[from]--
		}
	}
	return out
}

// Misplaces says whether p may name another slot than old for some device.
func (p *Service) Misplaces(old *Service) bool {
	if old == nil || !p.Service.By.KeepsDevices() {
		return false
	}
	return *p.Service.Seed != *old.Service.Seed || p.Service.By != old.Service.By || !slices.Equal(p.Table, old.Table) ||
		!maps.Equal(p.Moves(), old.Moves()) || p.Devices != old.Devices && (p.Devices == nil || old.Devices == nil || *p.Devices != *old.Devices)
}

// Changed is old with f applied; it is not published.
func Changed(r *kernel.Root, scope string, old *Service, f func(p *Service) error) (*Service, error) {
	p := new(Service)
	*p = *old
	p.Overrides = old.Overrides.Clone()
	p.Table = slices.Clone(old.Table)
	if p.List == nil {
		var err error
		if p.List, err = ReadDevices(r, p, scope); err != nil {
			return nil, err
		}
	}
	return p, f(p)
}

// device resolves what an operator calls a device.
func (p *Service) device(text string) (netip.Addr, error) {
	if a, err := netip.ParseAddr(text); err == nil {
		return p.List.Stands(a.WithZone("")), nil
	}
	if d := p.List.Named(text); d != nil {
		return d.Stands(), nil
	}
	if p.List == nil {
		return netip.Addr{}, fmt.Errorf("%w: %q is no IP address, and %s has no names of devices", ErrNoMove, text, p.Service.Name)
	}
	return netip.Addr{}, fmt.Errorf("%w: %q is neither an IP address nor a device in %s", ErrNoMove, text, p.Service.Devices)
}

// Drain takes a slot out of the table until Undrain. An error wraps ErrNoMove or ErrNoSlot.
func (p *Service) Drain(slot int) error {
	if slot < 0 || slot >= p.Service.Slots {
		return fmt.Errorf("%w: %s has slots 0 to %d", ErrNoSlot, p.Service.Name, p.Service.Slots-1)
	}
	if p.Service.By == spec.ByCPU {
		return fmt.Errorf("%w: by: cpu has no buckets: the slot is the number of the CPU", ErrNoMove)
	}
	if p.IsDrained(slot) {
		return fmt.Errorf("%w: slot %d is drained already", ErrNoMove, slot)
	}
	if len(p.Drained) == 0 {
		var home bytes.Buffer
		for _, s := range p.Table {
			home.WriteByte(byte(s))
		}
		p.Home = home.Bytes()
	}
	p.Drained = append(p.Drained, slot)
	slices.Sort(p.Drained)
	if _, total := p.weights(); total == 0 {
		return fmt.Errorf("%w: no other slot of %s has any weight: nobody would be left", ErrNoMove, p.Service.Name)
	}
	p.Rebalance()
	return nil
}

// Undrain gives a drained slot its buckets again. An error wraps ErrNoMove or ErrNoSlot.
func (p *Service) Undrain(slot int) error {
	i := slices.Index(p.Drained, slot)
	if i < 0 {
		return fmt.Errorf("%w: slot %d of %s is not drained", ErrNoMove, slot, p.Service.Name)
	}
	p.Drained = slices.Delete(p.Drained, i, i+1)
	p.Rebalance()
	return nil
}
