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

// ServedSlot is the member and the counters of a slot whose service changes its engine.
type ServedSlot struct {
	Member service.Member
	Counts [2][]bpf.SteerVerdicts
}

// ServedSlots returns the current members of a service.
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

// AdmitServed gives a slot to its member from the other engine, and copies the counters.
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
	e.vet = nil // a serving member is ready
	if _, err := e.admit(ctx, p, slot, h.Member, ns); err != nil && !errors.Is(err, service.ErrNotRunning) {
		return fmt.Errorf("slot %d: %w", slot, err)
	}
	return nil
}

// AdmitAll admits the members of a service just published in engine sk_reuseport. Groups are formed one by one.
// Meanwhile on_empty is pass: a packet for a pending member then reaches another member instead of being lost.
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

// KeptMove is the record written before a service leaves its engine. The members are briefly in no map. After a kill,
// the next command uses the record to readmit them.
const KeptMove = "engine-change"

// EngineMove is a service during a change of its engine.
type EngineMove struct {
	Scope   string                       `json:"scope"`
	Service string                       `json:"service"`
	OnEmpty map[spec.Engine]spec.OnEmpty `json:"on_empty"` // final value in each engine
	Served  map[int]MovedSlot            `json:"served"`
}

// MovedSlot is the recorded member of a service during a change of its engine.
type MovedSlot struct {
	Member service.Member         `json:"member"`
	Start  uint64                 `json:"start"`
	Counts [2][]bpf.SteerVerdicts `json:"counts"`
}

// FinishMove readmits the members after a killed change of engine, in the engine of the last publication.
func FinishMove(l *kernel.WriteLock) error {
	text, err := l.Kept(KeptMove)
	if err == nil && text == nil {
		return nil
	}
	var m EngineMove
	if err == nil {
		err = json.Unmarshal(text, &m)
	}
	if err == nil && !kernel.ValidName(m.Service) {
		err = fmt.Errorf("service %q has an invalid name", m.Service)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("the note of a killed change of engine was unreadable, and is removed: %s: %w: run weir apply again", l.KeptPath(KeptMove), err), l.Forget(KeptMove))
	}
	err = m.finish(l)
	if errors.Is(err, errUnread) || errors.Is(err, kernel.ErrABI) {
		return nil // retry while it is unreadable
	}
	if errors.Is(err, kernel.ErrNotExist) || errors.Is(err, slots.ErrNetnsGone) {
		err = nil // the service is gone, or its engine, which apply creates again
	}
	if err != nil {
		return fmt.Errorf("complete the killed change of engine of service %s: %w", m.Service, err)
	}
	kernel.Step("steer:move finished")
	return l.Forget(KeptMove)
}

var errUnread = errors.New("the service is unreadable")

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

// FreeSockets makes all other engines of a namespace release their unneeded sockets for engine keep.
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

// admit gives the empty slots to their recorded members.
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
