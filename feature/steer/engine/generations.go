// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
)

// known counts the remaining peers of a draining generation.
func (e *Engine) known(p *record.Service, d slots.Predecessor) (int, error) {
	if !d.DrainsFor(d.Heir-1) || d.Over() || !d.Who.Alive() {
		return 0, nil
	}
	o, err := e.Lock.Root.Open(record.Instance(e.Scope, p.Service.Name), "peers")
	if err != nil {
		return 0, err
	}
	defer o.Close()
	n, err := slots.CountPeers(o.Maps["peers"], d.Idle)
	return n[d.Row], err
}

// ErrDraining means that the previous member still drains. A slot has at most two generations.
var ErrDraining = errors.New("the previous generation still drains")

// SpareRows assigns a second row to every slot of a service with generations.
func (e *Engine) SpareRows(p, old *record.Service) error {
	if p.Service.Generations == nil {
		return nil
	}
	if old != nil && old.ID == p.ID {
		p.Spare = slices.Clone(old.Spare[:min(len(old.Spare), p.Service.Slots)])
	}
	more, err := e.FreeRows(p.Service.Slots-len(p.Spare), p.Rows...)
	p.Spare = append(p.Spare, more...)
	return err
}

// emptySpare empties a row but keeps its counters. A slot's counters are the sum of both rows.
func (e *Engine) emptySpare(row uint32) error {
	all, gens := e.Pins.Maps["slots"], e.Pins.Maps["gens"]
	if err := gens.Put(row, bpf.SteerGeneration{}); err != nil {
		return err
	}
	if err := all.Put(row, bpf.SteerSlot{State: uint32(slots.Changing)}); err != nil {
		return err
	}
	if err := e.forgetExits(row); err != nil {
		return err
	}
	for ep := range uint32(spec.MaxEndpoints) {
		if err := e.Pins.Maps["sockets"].Delete(row*spec.MaxEndpoints + ep); err != nil && !Gone(err) {
			return err
		}
	}
	return all.Put(row, bpf.SteerSlot{})
}

// swapped returns a copy of p with the two rows of a slot exchanged.
func (e *Engine) swapped(p *record.Service, slot int) (*record.Service, error) {
	return record.Changed(e.Lock.Root, e.Scope, p, func(p *record.Service) error {
		p.Rows, p.Spare = slices.Clone(p.Rows), slices.Clone(p.Spare)
		p.Rows[slot], p.Spare[slot] = p.Spare[slot], p.Rows[slot]
		return nil
	})
}

// superseded reports whether a new member is the next generation of the slot's current member.
func (e *Engine) superseded(p *record.Service, slot int, a *service.Adoption) (bool, error) {
	if p.Service.Generations == nil || len(p.Spare) <= slot {
		return false, nil
	}
	now, err := slots.Evaluate(e.Pins, p, slot)
	if err != nil || !now.Admitted() || slices.Contains(a.PIDs(), now.PID) {
		return false, err
	}
	who, err := slots.ProcessIn(e.Pins, p.Row(slot))
	return err == nil && who.Alive(), err
}

// supersede gives a slot to its next generation. A kill before the final replace affects no packet, because the service
// does not refer to the new row yet.
func (e *Engine) supersede(p *record.Service, slot int, a *service.Adoption, keep bool, ns *netns.Handle) (*record.Service, error) {
	d, err := slots.ReadPredecessor(e.Pins, p, slot)
	if err != nil {
		return nil, err
	}
	if left, err := e.known(p, d); err != nil || left > 0 {
		return nil, errors.Join(err, drainingError(d, left))
	}
	row, spare := p.Row(slot), p.Spare[slot]
	if err := e.emptySpare(spare); err != nil {
		return nil, err
	}
	kernel.Step("steer:generation emptied")
	next, err := e.swapped(p, slot)
	if err != nil {
		return nil, err
	}
	if err := e.assignNow(next, slot, a, keep, ns); err != nil {
		return nil, err
	}
	g, now := p.Service.Generations, kernel.Monotonic()
	gens := e.Pins.Maps["gens"]
	if err := gens.Put(spare, bpf.SteerGeneration{Before: row + 1}); err != nil {
		return nil, err
	}
	old := bpf.SteerGeneration{Heir: spare + 1, Since: now, Until: now + uint64(g.Deadline), Idle: uint64(g.Idle)}
	if err := gens.Put(row, old); err != nil {
		return nil, err
	}
	kernel.Step("steer:generation ready")
	if err := e.replace(next, p, nil); err != nil {
		return nil, err
	}
	kernel.Step("steer:generation changed")
	return next, nil
}

func drainingError(d slots.Predecessor, peers int) error {
	if peers == 0 {
		return nil
	}
	return fmt.Errorf("%w: process %d has %d UDP peers, until %s at the latest: end it, or wait (weir steer retire)", ErrDraining, d.Who.PID, peers, kernel.WallTime(d.Until).Format("15:04:05"))
}

// FallBack returns a slot to the previous generation if the newest one is gone and the previous process still runs. The
// program does the same per packet, but only during the drain.
func (e *Engine) FallBack(p *record.Service, slot int) (done bool, err error) {
	if p.Service.Generations == nil || len(p.Spare) <= slot {
		return false, nil
	}
	var s bpf.SteerSlot
	if err := e.Pins.Maps["slots"].Lookup(p.Row(slot), &s); err != nil || slots.RowState(s.State) == slots.Withdrawn {
		return false, err
	}
	d, err := slots.ReadPredecessor(e.Pins, p, slot)
	if err != nil || !d.DrainsFor(p.Row(slot)) || !d.Who.Alive() {
		return false, err
	}
	next, err := e.swapped(p, slot)
	if err != nil {
		return false, err
	}
	if now, err := slots.Evaluate(e.Pins, next, slot); err != nil || !now.Admitted() {
		return false, err
	}
	if err := e.replace(next, p, nil); err != nil {
		return false, err
	}
	return true, errors.Join(e.Pins.Maps["gens"].Put(next.Row(slot), bpf.SteerGeneration{}), e.emptySpare(next.Spare[slot]))
}

// forgetGeneration ends the previous generation of a withdrawn slot.
func (e *Engine) forgetGeneration(p *record.Service, slot int) error {
	if len(p.Spare) <= slot {
		return nil
	}
	return e.emptySpare(p.Spare[slot])
}

// pinPeers returns the map of a service's UDP peers: the pinned one, or a new one if its size differs.
func (e *Engine) pinPeers(p *record.Service) (*ebpf.Map, error) {
	spec, err := bpf.LoadSteer()
	if err != nil {
		return nil, err
	}
	inner := spec.Maps[bpf.SteerMapSteerKnown].InnerMap.Copy()
	inner.Name, inner.MaxEntries = "steer_peers", uint32(p.Service.Generations.Peers)
	if old := e.Services[p.Service.Name]; old != nil && old.ID == p.ID && old.Service.Generations != nil {
		o, err := e.Lock.Open(record.Instance(e.Scope, p.Service.Name))
		if errors.Is(err, kernel.ErrDamaged) || errors.Is(err, kernel.ErrNotExist) {
			o, err = &kernel.Opened{}, nil // the service is being recovered: peers are learned again
		}
		if err != nil {
			return nil, err
		}
		defer o.Close()
		if m := o.Maps["peers"]; m != nil && inner.Compatible(m) == nil {
			return m.Clone()
		}
	}
	m, err := ebpf.NewMap(inner)
	if err != nil {
		return nil, fmt.Errorf("create map of peers: %w", err)
	}
	return m, nil
}

// putPeers points steer_known at a service's own map of peers.
func (e *Engine) putPeers(p *record.Service, own *ebpf.Map) error {
	if own == nil {
		return nil
	}
	same, err := record.ContainsMap(e.Pins.Maps["known"], p.ID, own)
	if err != nil || same {
		return err
	}
	if err := e.Pins.Maps["known"].Put(p.ID, own); err != nil {
		return err
	}
	kernel.Step("steer:peers")
	return nil
}

// dropPeers removes the peers of a service without generations.
func (e *Engine) dropPeers(id uint32) error {
	if e.Kind == spec.EngineReuseport {
		return nil // this engine has no generations
	}
	if err := e.Pins.Maps["known"].Delete(id); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	return nil
}
