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

// Overrides are operator changes, pinned beside a service's configuration. They outlive every apply until an operator
// undoes them.
type Overrides struct {
	Devices  *spec.DeviceFile     `json:"devices,omitempty"`  // the file as last read
	Moved    map[netip.Addr]int   `json:"moved,omitempty"`    // device to slot
	Placed   map[int]PlacedBucket `json:"placed,omitempty"`   // bucket to slot
	Drained  []int                `json:"drained,omitempty"`  // slots that get no bucket for now
	Home     []byte               `json:"home,omitempty"`     // the table before the first drain
	Bypassed bool                 `json:"bypassed,omitempty"` // no packet is steered

	List *spec.DeviceList `json:"-"` // of Devices
}

// PlacedBucket is a bucket moved by an operator.
type PlacedBucket struct {
	To   int `json:"to"`
	From int `json:"from"` // its slot without the move
}

// Clone copies the overrides. A change of the copy leaves the original record unchanged.
func (v Overrides) Clone() Overrides {
	v.Moved, v.Placed = maps.Clone(v.Moved), maps.Clone(v.Placed)
	v.Drained, v.Home = slices.Clone(v.Drained), slices.Clone(v.Home)
	return v
}

// IsDrained reports whether an operator drained the slot.
func (v Overrides) IsDrained(slot int) bool { return slices.Contains(v.Drained, slot) }

// Moves returns the device moves in force. A drained slot gets no device until it is undrained.
func (p *Service) Moves() map[netip.Addr]int {
	out := map[netip.Addr]int{}
	for a, slot := range p.Moved {
		if p.Service.By.KeepsDevices() && slot < p.Service.Slots && !p.IsDrained(slot) {
			out[a] = slot
		}
	}
	return out
}

// weights returns the slots' effective weights and their sum.
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

// Shape derives the table and the overrides of p from old, which may be nil. As few buckets as possible move.
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

// DropGone removes overrides of slots that no longer exist.
func (p *Service) DropGone() {
	slots := p.Service.Slots
	maps.DeleteFunc(p.Moved, func(_ netip.Addr, slot int) bool { return slot >= slots })
	maps.DeleteFunc(p.Placed, func(_ int, to PlacedBucket) bool { return to.To >= slots })
	p.Drained = slices.DeleteFunc(p.Drained, func(slot int) bool { return slot >= slots })
	if _, total := p.weights(); total == 0 {
		p.Drained = nil // no slot would remain
	}
}

// Rebalance gives each slot its share of buckets. A previously drained slot gets its former buckets back. Buckets
// placed by an operator stay.
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

// fair reports whether a table gives every slot its share, up to rounding.
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

// returnHome returns a slot's former buckets after a drain. Most devices then return to their previous collector.
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

// Misplaces reports whether p may assign some device to another slot than old.
func (p *Service) Misplaces(old *Service) bool {
	if old == nil || !p.Service.By.KeepsDevices() {
		return false
	}
	return *p.Service.Seed != *old.Service.Seed || p.Service.By != old.Service.By || !slices.Equal(p.Table, old.Table) ||
		!maps.Equal(p.Moves(), old.Moves()) || p.Devices != old.Devices && (p.Devices == nil || old.Devices == nil || *p.Devices != *old.Devices)
}

// Changed returns a copy of old, changed by f. It does not publish the copy.
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

// device resolves an address or a device name.
func (p *Service) device(text string) (netip.Addr, error) {
	if a, err := netip.ParseAddr(text); err == nil {
		return p.List.Stands(a.WithZone("")), nil
	}
	if d := p.List.Named(text); d != nil {
		return d.Stands(), nil
	}
	if p.List == nil {
		return netip.Addr{}, fmt.Errorf("%w: %q is not an IP address, and %s has no devices file", ErrNoMove, text, p.Service.Name)
	}
	return netip.Addr{}, fmt.Errorf("%w: %q is neither an IP address nor a device in %s", ErrNoMove, text, p.Service.Devices)
}

// Drain removes a slot from the table until Undrain. An error wraps ErrNoMove or ErrNoSlot.
func (p *Service) Drain(slot int) error {
	if slot < 0 || slot >= p.Service.Slots {
		return fmt.Errorf("%w: %s has slots 0 to %d", ErrNoSlot, p.Service.Name, p.Service.Slots-1)
	}
	if p.Service.By == spec.ByCPU {
		return fmt.Errorf("%w: by: cpu has no buckets: the slot depends on the CPU", ErrNoMove)
	}
	if p.IsDrained(slot) {
		return fmt.Errorf("%w: slot %d is already drained", ErrNoMove, slot)
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
		return fmt.Errorf("%w: no other slot of %s has weight", ErrNoMove, p.Service.Name)
	}
	p.Rebalance()
	return nil
}

// Undrain gives a drained slot its buckets again. An error wraps ErrNoMove.
func (p *Service) Undrain(slot int) error {
	i := slices.Index(p.Drained, slot)
	if i < 0 {
		return fmt.Errorf("%w: slot %d of %s is not drained", ErrNoMove, slot, p.Service.Name)
	}
	p.Drained = slices.Delete(p.Drained, i, i+1)
	p.Rebalance()
	return nil
}
