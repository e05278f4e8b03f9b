// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/weir-project/weir/kernel"
)

// maxMoved bounds the devices that are moved by hand in one service: they are
// kept with its configuration, which must fit into one value of a map.
const maxMoved = 4096

// ErrNoMove says that a change of where traffic goes makes no sense.
var ErrNoMove = errors.New("cannot move")

// live is what a service's pins keep beside its configuration: what operators
// changed while it ran, which outlives every apply until they take it back.
type live struct {
	Devices  *deviceFile        `json:"devices,omitempty"`  // the file as it was when it was read
	Moved    map[netip.Addr]int `json:"moved,omitempty"`    // device to slot
	Placed   map[int]placed     `json:"placed,omitempty"`   // bucket to slot
	Drained  []int              `json:"drained,omitempty"`  // slots that get no bucket for now
	Home     []byte             `json:"home,omitempty"`     // the table before the first of them was drained
	Bypassed bool               `json:"bypassed,omitempty"` // no packet is steered

	list *DeviceList // of Devices
}

// placed is a bucket that was moved by hand.
type placed struct {
	To   int `json:"to"`
	From int `json:"from"` // whose it is otherwise
}

func (v live) clone() live {
	v.Moved, v.Placed = maps.Clone(v.Moved), maps.Clone(v.Placed)
	v.Drained, v.Home = slices.Clone(v.Drained), slices.Clone(v.Home)
	return v
}

func (v live) drained(slot int) bool { return slices.Contains(v.Drained, slot) }

// moves are the moves of devices that hold now: a drained slot gets none, and
// they come back to it when it is undrained.
func (p *published) moves() map[netip.Addr]int {
	out := map[netip.Addr]int{}
	for a, slot := range p.Moved {
		if p.Service.By.holdsDevices() && slot < p.Service.Slots && !p.drained(slot) {
			out[a] = slot
		}
	}
	return out
}

// weights are the slots' effective ones.
func (p *published) weights() (weights []int, total int) {
	weights = make([]int, p.Service.Slots)
	for slot := range weights {
		w, ok := p.Service.Weights[slot]
		if !ok {
			w = 1
		}
		if p.drained(slot) {
			w = 0
		}
		weights[slot] = w
		total += w
	}
	return weights, total
}

// shape gives p the table that follows from that of old, which may be nil, and
// what operators changed about old. As few buckets move as can.
func (p *published) shape(old *published) {
	if old == nil {
		p.table = Assign(p.Service.Slots)
		if len(p.Service.Weights) > 0 {
			p.rebalance()
		}
		return
	}
	file, list := p.Devices, p.list
	p.live = old.live.clone()
	p.Devices, p.list = file, list
	p.dropGone()
	p.table = slices.Clone(old.table)
	before, _ := old.weights()
	if after, _ := p.weights(); !slices.Equal(before, after) {
		p.rebalance()
	}
}

// dropGone forgets what was changed about slots that there are no more.
func (p *published) dropGone() {
	slots := p.Service.Slots
	maps.DeleteFunc(p.Moved, func(_ netip.Addr, slot int) bool { return slot >= slots })
	maps.DeleteFunc(p.Placed, func(_ int, to placed) bool { return to.To >= slots })
	p.Drained = slices.DeleteFunc(p.Drained, func(slot int) bool { return slot >= slots })
	if _, total := p.weights(); total == 0 {
		p.Drained = nil // nobody would be left
	}
}

// rebalance gives each slot its share. Buckets of a slot that was drained go back
// to it, and those placed by hand stay where they were put.
func (p *published) rebalance() {
	weights, _ := p.weights()
	if len(p.Drained) == 0 && fair(p.Home, weights) {
		for b, slot := range p.Home {
			p.table[b] = uint16(slot)
		}
	} else {
		p.table = Rebalance(returnHome(p.table, p.Home, weights), p.Service.Slots, weights...)
	}
	for b, to := range p.Placed {
		if p.drained(to.To) {
			continue
		}
		if int(p.table[b]) != to.To {
			to.From = int(p.table[b])
			p.Placed[b] = to
			p.table[b] = uint16(to.To)
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
		if least := Buckets * weights[slot] / total; n != least && n != least+1 {
			return false
		}
	}
	return len(home) == Buckets
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
	share := shares(held, len(weights), weights)
	count := make([]int, len(weights))
	for slot := range held {
		count[slot] = len(held[slot])
	}
	for _, b := range permutation {
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

// misplaces says whether p may name another slot than old for some device.
func (p *published) misplaces(old *published) bool {
	if old == nil || !p.Service.By.holdsDevices() {
		return false
	}
	return *p.Service.Seed != *old.Service.Seed || p.Service.By != old.Service.By || !slices.Equal(p.table, old.table) ||
		!maps.Equal(p.moves(), old.moves()) || p.Devices != old.Devices && (p.Devices == nil || old.Devices == nil || *p.Devices != *old.Devices)
}

// change alters a published service and nothing of its configuration. One store
// makes it take effect, for all protocols at once.
func change(l *kernel.WriteLock, scope, name string, rate *Rate, f func(p *published) error) error {
	e, old, err := openSlot(l, Slot{Scope: scope, Service: name})
	if err != nil {
		return err
	}
	defer e.Close()
	p, err := changed(l.Root, scope, old, f)
	if err != nil {
		return err
	}
	return e.replace(p, old, rate)
}

// changed is old with f applied; it is not published.
func changed(r *kernel.Root, scope string, old *published, f func(p *published) error) (*published, error) {
	p := new(published)
	*p = *old
	p.live = old.live.clone()
	p.table = slices.Clone(old.table)
	if p.list == nil {
		var err error
		if p.list, err = readDevices(r, p, scope); err != nil {
			return nil, err
		}
	}
	return p, f(p)
}

// replace publishes p over old, which has the same endpoints and rows.
func (e *engine) replace(p, old *published, rate *Rate) error {
	if err := e.mark(true); err != nil {
		return err
	}
	kernel.Step("steer:marked")
	if p.misplaces(old) {
		if err := e.owe(p, rate); err != nil {
			return err
		}
	}
	if err := e.publishService(p); err != nil {
		return err
	}
	kernel.Step("steer:published")
	return e.sync()
}

// Moving names what weir steer move moves.
type Moving struct {
	Device string // address, or name of a device; empty: Bucket
	Bucket int
	To     int
	Back   bool // to where it is without having been moved
}

// Move puts a device or a bucket into another slot, or back. rate is that of the
// resets that follow (see [ResetDue]), nil for the service's.
func Move(l *kernel.WriteLock, scope, service string, m Moving, rate *Rate) error {
	return change(l, scope, service, rate, m.apply)
}

func (m Moving) apply(p *published) error {
	if !m.Back && (m.To < 0 || m.To >= p.Service.Slots) {
		return fmt.Errorf("%w: %d: %s has slots 0 to %d", ErrNoSlot, m.To, p.Service.Name, p.Service.Slots-1)
	}
	if !m.Back && p.drained(m.To) {
		return fmt.Errorf("%w: slot %d is drained: weir steer undrain %s --slot %d", ErrNoMove, m.To, p.Service.Name, m.To)
	}
	if m.Device == "" {
		return m.applyBucket(p)
	}
	if !p.Service.By.holdsDevices() {
		return fmt.Errorf("%w: by: %s keeps no device in one place: move a bucket", ErrNoMove, p.Service.By)
	}
	a, err := p.device(m.Device)
	if err != nil {
		return err
	}
	if m.Back {
		if _, ok := p.Moved[a]; !ok {
			return fmt.Errorf("%w: %s has not been moved", ErrNoMove, m.Device)
		}
		delete(p.Moved, a)
		return nil
	}
	if p.Moved == nil {
		p.Moved = map[netip.Addr]int{}
	}
	p.Moved[a] = m.To
	if len(p.Moved) > maxMoved {
		return fmt.Errorf("%w: %d devices are moved by hand already, the most there can be: use weights", ErrNoMove, maxMoved)
	}
	return nil
}

func (m Moving) applyBucket(p *published) error {
	if p.Service.By == ByCPU {
		return fmt.Errorf("%w: by: cpu has no buckets", ErrNoMove)
	}
	if m.Bucket < 0 || m.Bucket >= Buckets {
		return fmt.Errorf("%w: bucket %d: want a number from 0 to %d", ErrNoMove, m.Bucket, Buckets-1)
	}
	was, hand := p.Placed[m.Bucket]
	if m.Back {
		if !hand {
			return fmt.Errorf("%w: bucket %d has not been moved", ErrNoMove, m.Bucket)
		}
		delete(p.Placed, m.Bucket)
		if was.From < p.Service.Slots && !p.drained(was.From) {
			p.table[m.Bucket] = uint16(was.From)
		} else {
			p.rebalance()
		}
		return nil
	}
	if !hand {
		was.From = int(p.table[m.Bucket])
	}
	was.To = m.To
	if p.Placed == nil {
		p.Placed = map[int]placed{}
	}
	p.Placed[m.Bucket] = was
	p.table[m.Bucket] = uint16(m.To)
	return nil
}

// device resolves what an operator calls a device.
func (p *published) device(text string) (netip.Addr, error) {
	if a, err := netip.ParseAddr(text); err == nil {
		return p.list.stands(a.WithZone("")), nil
	}
	if d := p.list.Named(text); d != nil {
		return d.Stands(), nil
	}
	if p.list == nil {
		return netip.Addr{}, fmt.Errorf("%w: %q is no IP address, and %s has no names of devices", ErrNoMove, text, p.Service.Name)
	}
	return netip.Addr{}, fmt.Errorf("%w: %q is neither an IP address nor a device in %s", ErrNoMove, text, p.Service.Devices)
}

// Drain takes a slot's buckets away until it is undrained: what it serves goes to
// the others, as if its weight were 0. Its member stays.
func Drain(l *kernel.WriteLock, s Slot, rate *Rate) error {
	return change(l, s.Scope, s.Service, rate, func(p *published) error { return p.drain(s.Slot) })
}

func (p *published) drain(slot int) error {
	if slot < 0 || slot >= p.Service.Slots {
		return fmt.Errorf("%w: %s has slots 0 to %d", ErrNoSlot, p.Service.Name, p.Service.Slots-1)
	}
	if p.Service.By == ByCPU {
		return fmt.Errorf("%w: by: cpu has no buckets: the slot is the number of the CPU", ErrNoMove)
	}
	if p.drained(slot) {
		return fmt.Errorf("%w: slot %d is drained already", ErrNoMove, slot)
	}
	if len(p.Drained) == 0 {
		var home bytes.Buffer
		for _, s := range p.table {
			home.WriteByte(byte(s))
		}
		p.Home = home.Bytes()
	}
	p.Drained = append(p.Drained, slot)
	slices.Sort(p.Drained)
	if _, total := p.weights(); total == 0 {
		return fmt.Errorf("%w: no other slot of %s has any weight: nobody would be left", ErrNoMove, p.Service.Name)
	}
	p.rebalance()
	return nil
}

// Undrain gives a drained slot its buckets back.
func Undrain(l *kernel.WriteLock, s Slot, rate *Rate) error {
	return change(l, s.Scope, s.Service, rate, func(p *published) error { return p.undrain(s.Slot) })
}

func (p *published) undrain(slot int) error {
	i := slices.Index(p.Drained, slot)
	if i < 0 {
		return fmt.Errorf("%w: slot %d of %s is not drained", ErrNoMove, slot, p.Service.Name)
	}
	p.Drained = slices.Delete(p.Drained, i, i+1)
	p.rebalance()
	return nil
}
