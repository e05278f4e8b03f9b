// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
)

// ServedSlot is a member that serves a slot of a service whose engine changes, and what it has counted.
type ServedSlot struct {
	Member service.Member
	Counts [2][]bpf.SteerVerdicts
}

// ServedSlots are the members that serve a service now.
func (e *Engine) ServedSlots(p *record.Service) (map[int]ServedSlot, error) {
	out := map[int]ServedSlot{}
	for slot, row := range p.Rows {
		who, err := slots.ProcessIn(e.Pins, row)
		if err != nil {
			return nil, err
		}
		if now, err := slots.FindProcess(who.PID); who.PID == 0 || err != nil || now != who {
			continue // empty, or its process has exited
		}
		h := ServedSlot{Member: *slots.State{Slot: slot, PID: who.PID}.OccupantMember(p.Service.Member(slot))}
		for proto := range uint32(2) {
			if err := e.Pins.Maps["verdicts"].Lookup(row*2+proto, &h.Counts[proto]); err != nil {
				return nil, err
			}
		}
		out[slot] = h
	}
	return out, nil
}

// AdmitServed gives a slot to the member that had it in the other engine, with its counts.
func (e *Engine) AdmitServed(ctx context.Context, p *record.Service, slot int, ns *netns.Handle) error {
	h, ok := e.Coming[slot]
	if !ok {
		return nil
	}
	for proto := range uint32(2) {
		if err := e.Pins.Maps["verdicts"].Put(p.Row(slot)*2+proto, h.Counts[proto]); err != nil {
			return err
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	e.vet = nil // it serves: it is ready
	if _, err := e.admit(ctx, p, slot, h.Member, ns); err != nil && !errors.Is(err, service.ErrNotRunning) {
		return fmt.Errorf("slot %d: %w", slot, err)
	}
	return nil
}

// AdmitAll gives a service that was published in engine sk_reuseport its members. Groups are made one by one: on_empty is
// pass meanwhile, so that a packet for a member that is still to come reaches another one and not nobody.
func (e *Engine) AdmitAll(ctx context.Context, p *record.Service, onEmpty spec.OnEmpty, ns *netns.Handle) (*record.Service, error) {
	for slot := range p.Rows {
		if err := e.AdmitServed(ctx, p, slot, ns); err != nil {
			return p, err
		}
	}
	if err := kernel.Try("steer:moved over"); err != nil {
		return p, err
	}
	final, err := record.Changed(e.Lock.Root, e.Scope, p, func(p *record.Service) error { p.Service.OnEmpty = onEmpty; return nil })
	if err != nil {
		return p, err
	}
	return final, e.replace(final, p, nil)
}

// KeptMove is what a change of engine writes down before a service leaves its engine: its members are in no map for a
// moment, and the next command gives them their slots again should this one be killed.
const KeptMove = "engine-change"

// EngineMove is a service whose engine changes.
type EngineMove struct {
	Scope   string                       `json:"scope"`
	Service string                       `json:"service"`
	OnEmpty map[spec.Engine]spec.OnEmpty `json:"on_empty"` // as it is in each engine, once its members are there
	Served  map[int]MovedSlot            `json:"served"`
}

// MovedSlot is a member whose service changes its engine, as it is kept for the case of a kill.
type MovedSlot struct {
	Member service.Member         `json:"member"`
	Start  uint64                 `json:"start"`
	Counts [2][]bpf.SteerVerdicts `json:"counts"`
}

// FinishMove gives a service whose change of engine was killed its members, in the engine that it was published in last.
func FinishMove(l *kernel.WriteLock) error {
	text, err := l.Kept(KeptMove)
	if err != nil || text == nil {
		return err
	}
	var m EngineMove
	if err := json.Unmarshal(text, &m); err != nil {
		return errors.Join(fmt.Errorf("what a killed change of engine left: %w", err), l.Forget(KeptMove))
	}
	err = m.finish(l)
	if errors.Is(err, errUnread) || errors.Is(err, kernel.ErrABI) {
		return nil // as long as it cannot be read
	}
	if errors.Is(err, kernel.ErrNotExist) || errors.Is(err, slots.ErrNetnsGone) {
		err = nil // the service is gone, or its engine, which apply makes anew
	}
	if err != nil {
		return fmt.Errorf("service %s, whose change of engine was killed: %w", m.Service, err)
	}
	kernel.Step("steer:move finished")
	return l.Forget(KeptMove)
}

var errUnread = errors.New("the service cannot be read")

func (m EngineMove) finish(l *kernel.WriteLock) error {
	p, err := record.Read(l.Root, record.Instance(m.Scope, m.Service))
	if errors.Is(err, kernel.ErrNotExist) {
		return err
	} else if err != nil {
		return fmt.Errorf("%w: %w", errUnread, err)
	}
	if err := FreeSockets(l, m.Scope, p.Engine); err != nil {
		return err
	}
	e, err := OpenEngine(l, m.Scope, p.Engine)
	if err != nil {
		return err
	}
	defer e.Close()
	return m.admit(l, e, e.Services[m.Service])
}

// FreeSockets has all engines of a namespace but one let go of sockets that are no longer
// theirs, so that the one can take them.
func FreeSockets(l *kernel.WriteLock, scope string, keep spec.Engine) error {
	for _, kind := range record.Engines {
		if kind == keep {
			continue
		}
		e, err := OpenEngine(l, scope, kind)
		if errors.Is(err, kernel.ErrNotExist) {
			continue
		} else if err != nil {
			return err
		}
		err = errors.Join(e.Reconcile(), e.RemoveIdle())
		e.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

// admit gives the slots that are empty to the members that had them.
func (m EngineMove) admit(l *kernel.WriteLock, e *Engine, p *record.Service) error {
	ns, err := e.openNetns()
	if err != nil {
		return err
	}
	defer ns.Close()
	now, err := e.ServedSlots(p)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	e.Coming = map[int]ServedSlot{}
	for slot, h := range m.Served {
		who, err := slots.FindProcess(h.Member.PID)
		if _, has := now[slot]; has || slot >= p.Service.Slots || err != nil || who.Start != h.Start {
			continue
		}
		e.Coming[slot] = ServedSlot{h.Member, h.Counts}
	}
	for slot := range maps.Keys(e.Coming) {
		if err := e.AdmitServed(ctx, p, slot, ns); err != nil && !NotYet(err) {
			return err
		}
	}
	if onEmpty := m.OnEmpty[p.Engine]; onEmpty != "" && onEmpty != p.Service.OnEmpty {
		final, err := record.Changed(l.Root, m.Scope, p, func(p *record.Service) error { p.Service.OnEmpty = onEmpty; return nil })
		if err != nil {
			return err
		}
		return e.replace(final, p, nil)
	}
	return nil
}
