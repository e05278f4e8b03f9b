// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/strictyaml"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
)

// A slot with generations has two rows, in turn: the one that the service names,
// and one beside it. The next member gets the other row while the one before goes
// on; when all its sockets are there, the service names the other row: one store,
// for every packet after it. From then on the program gives the row before what
// its known UDP peers send, until they are silent or its time is over, by itself.

// Generations is what a service says of members that replace each other: the one
// before keeps the UDP peers that it knows, and all else is the next one's.
type Generations struct {
	strictyaml.Pos `yaml:"-" json:"-"`
	Idle           time.Duration `yaml:"idle" json:"idle"`         // silence after which a peer is new, ns
	Deadline       time.Duration `yaml:"deadline" json:"deadline"` // after which the one before gets nothing, ns
	Peers          int           `yaml:"peers" json:"peers"`       // UDP peers that are remembered; beyond, those silent longest go
}

// Defaults of generations: QUIC's usual idle timeout, and what an operator waits.
const (
	DefaultGenerationIdle     = 30 * time.Second
	DefaultGenerationDeadline = 5 * time.Minute
	DefaultGenerationPeers    = 65536
)

// flagGenerations has the program note UDP peers.
const flagGenerations = 4

// ErrDraining says that a slot's member before the present one still drains: two
// generations are side by side, never three.
var ErrDraining = errors.New("the generation before is still drained")

func (g *Generations) withDefaults() *Generations {
	if g == nil {
		return nil
	}
	out := *g
	if out.Idle == 0 {
		out.Idle = DefaultGenerationIdle
	}
	if out.Deadline == 0 {
		out.Deadline = DefaultGenerationDeadline
	}
	if out.Peers == 0 {
		out.Peers = DefaultGenerationPeers
	}
	return &out
}

func (s Service) validateGenerations(fail func(string, ...any)) {
	g := s.Generations
	switch {
	case g == nil:
	case s.By == ByQUIC || s.Engine == EngineReuseport:
		fail("generations need engine sk_lookup, which can give a packet to any socket")
	case g.Idle < 20*time.Millisecond || g.Idle > time.Hour:
		fail("generations.idle %s: want a time from 20ms to 1h", g.Idle)
	case g.Deadline < g.Idle || g.Deadline > 24*time.Hour:
		fail("generations.deadline %s: want a time from idle (%s) to 24h", g.Deadline, g.Idle)
	case g.Peers < 256 || g.Peers > 1<<22:
		fail("generations.peers %d: want a number from 256 to %d", g.Peers, 1<<22)
	}
}

// String is the option as plans show it.
func (g *Generations) String() string {
	if g == nil {
		return "none"
	}
	return fmt.Sprintf("(idle %s, deadline %s, %d peers)", g.Idle, g.Deadline, g.Peers)
}

// spareRows gives every slot of a service with generations its second row.
func (e *engine) spareRows(p, old *published) error {
	if p.Service.Generations == nil {
		return nil
	}
	if old != nil && old.ID == p.ID {
		p.Spare = slices.Clone(old.Spare[:min(len(old.Spare), p.Service.Slots)])
	}
	more, err := e.freeRows(p.Service.Slots-len(p.Spare), p.Rows...)
	p.Spare = append(p.Spare, more...)
	return err
}

// emptySpare has a row hold nobody. Its counters stay: a slot's are those of both rows.
func (e *engine) emptySpare(row uint32) error {
	slots, gens := e.pins.Maps["slots"], e.pins.Maps["gens"]
	if err := gens.Put(row, bpf.SteerGeneration{}); err != nil {
		return err
	}
	if err := slots.Put(row, bpf.SteerSlot{State: uint32(stateChanging)}); err != nil {
		return err
	}
	if err := e.forgetExits(row); err != nil {
		return err
	}
	for ep := range uint32(maxEndpoints) {
		if err := e.pins.Maps["sockets"].Delete(row*maxEndpoints + ep); err != nil && !gone(err) {
			return err
		}
	}
	return slots.Put(row, bpf.SteerSlot{})
}

// swapped is p with the rows of a slot changed over.
func (e *engine) swapped(p *published, slot int) (*published, error) {
	return changed(e.lock.Root, e.scope, p, func(p *published) error {
		p.Rows, p.Spare = slices.Clone(p.Rows), slices.Clone(p.Spare)
		p.Rows[slot], p.Spare[slot] = p.Spare[slot], p.Rows[slot]
		return nil
	})
}

// superseded says whether a member that is to be admitted is the next generation of
// another one that serves the slot.
func (e *engine) superseded(p *published, slot int, a *service.Adoption) (bool, error) {
	if p.Service.Generations == nil || len(p.Spare) <= slot {
		return false, nil
	}
	now, err := judgeSlot(e.pins, p, slot)
	if err != nil || !now.Admitted() || slices.Contains(a.PIDs(), now.PID) {
		return false, err
	}
	who, err := processIn(e.pins, p.row(slot))
	return err == nil && who.alive(), err
}

// alive says whether the process still runs.
func (p process) alive() bool {
	now, err := processOf(p.pid)
	return err == nil && now == p && runs(p.pid)
}

// supersede gives a slot to its next generation. What is found half done after a
// kill was seen by no packet: the service did not name the row yet.
func (e *engine) supersede(p *published, slot int, a *service.Adoption, keep bool, ns *netns.Handle) (*published, error) {
	d, err := readDrain(e.pins, p, slot)
	if err != nil {
		return nil, err
	}
	if left, err := e.known(p, d); err != nil || left > 0 {
		return nil, errors.Join(err, drainingError(d, left))
	}
	row, spare := p.row(slot), p.Spare[slot]
	if err := e.emptySpare(spare); err != nil {
		return nil, err
	}
	kernel.Step("steer:generation emptied")
	next, err := e.swapped(p, slot)
	if err != nil {
		return nil, err
	}
	if err := e.place(next, slot, a, keep, ns); err != nil {
		return nil, err
	}
	g, now := p.Service.Generations, kernel.Monotonic()
	gens := e.pins.Maps["gens"]
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

func drainingError(d predecessor, peers int) error {
	if peers == 0 {
		return nil
	}
	return fmt.Errorf("%w: process %d has %d UDP peers, until %s at most: end it, or wait (weir steer retire)", ErrDraining, d.who.pid, peers, kernel.WallTime(d.Until).Format("15:04:05"))
}

// fallBack gives a slot whose newest generation is gone back to the one before, if that lives.
// The program does the same for each packet, but no longer than that drains.
func (e *engine) fallBack(p *published, slot int) (done bool, err error) {
	if p.Service.Generations == nil || len(p.Spare) <= slot {
		return false, nil
	}
	var s bpf.SteerSlot
	if err := e.pins.Maps["slots"].Lookup(p.row(slot), &s); err != nil || slotState(s.State) == stateWithdrawn {
		return false, err
	}
	d, err := readDrain(e.pins, p, slot)
	if err != nil || !d.is(p.row(slot)) || !d.who.alive() {
		return false, err
	}
	next, err := e.swapped(p, slot)
	if err != nil {
		return false, err
	}
	if now, err := judgeSlot(e.pins, next, slot); err != nil || !now.Admitted() {
		return false, err
	}
	if err := e.replace(next, p, nil); err != nil {
		return false, err
	}
	return true, errors.Join(e.pins.Maps["gens"].Put(next.row(slot), bpf.SteerGeneration{}), e.emptySpare(next.Spare[slot]))
}

// forgetGeneration has the generation before get nothing more: its slot is withdrawn.
func (e *engine) forgetGeneration(p *published, slot int) error {
	if len(p.Spare) <= slot {
		return nil
	}
	return e.emptySpare(p.Spare[slot])
}

// pinPeers is the map of a service's UDP peers: the one that its pins have, or a
// new one where they have none of the size.
func (e *engine) pinPeers(p *published) (*ebpf.Map, error) {
	spec, err := bpf.LoadSteer()
	if err != nil {
		return nil, err
	}
	inner := spec.Maps[bpf.SteerMapSteerKnown].InnerMap.Copy()
	inner.Name, inner.MaxEntries = "steer_peers", uint32(p.Service.Generations.Peers)
	if old := e.services[p.Service.Name]; old != nil && old.ID == p.ID && old.Service.Generations != nil {
		o, err := e.lock.Open(serviceInstance(e.scope, p.Service.Name))
		if errors.Is(err, kernel.ErrDamaged) || errors.Is(err, kernel.ErrNotExist) {
			o, err = &kernel.Opened{}, nil // it is being recovered: peers are learned again
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
		return nil, fmt.Errorf("making the map of peers: %w", err)
	}
	return m, nil
}

// putPeers points steer_known at a service's own map of peers.
func (e *engine) putPeers(p *published, own *ebpf.Map) error {
	if own == nil {
		return nil
	}
	same, err := holdsMap(e.pins.Maps["known"], p.ID, own)
	if err != nil || same {
		return err
	}
	if err := e.pins.Maps["known"].Put(p.ID, own); err != nil {
		return err
	}
	kernel.Step("steer:peers")
	return nil
}

// dropPeers takes the peers of a service that is gone, or has no generations any more, away.
func (e *engine) dropPeers(id uint32) error {
	if e.kind == EngineReuseport {
		return nil // it has no generations
	}
	if err := e.pins.Maps["known"].Delete(id); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	return nil
}
