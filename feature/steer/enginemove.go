// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
)

// keptMove is what a change of engine writes down before a service leaves its engine: its members are in no map for a
// moment, and the next command gives them their slots again should this one be killed.
const keptMove = "engine-change"

// engineMove is a service whose engine changes.
type engineMove struct {
	Scope   string             `json:"scope"`
	Service string             `json:"service"`
	OnEmpty map[Engine]OnEmpty `json:"on_empty"` // as it is in each engine, once its members are there
	Held    map[int]movedSlot  `json:"held"`
}

type movedSlot struct {
	Member service.Member         `json:"member"`
	Start  uint64                 `json:"start"`
	Counts [2][]bpf.SteerVerdicts `json:"counts"`
}

// keepMove writes down what the service and its members are.
func (t target) keepMove(l *kernel.WriteLock, was *published, held map[int]heldSlot) error {
	m := engineMove{t.scope, t.service.Name, map[Engine]OnEmpty{was.Engine: was.Service.OnEmpty}, map[int]movedSlot{}}
	for _, kind := range kinds {
		if kind != was.Engine {
			m.OnEmpty[kind] = t.service.OnEmpty
		}
	}
	for slot, h := range held {
		who, err := processOf(h.member.PID)
		if err != nil {
			continue // it has just exited
		}
		m.Held[slot] = movedSlot{h.member, who.start, h.counts}
	}
	text, err := json.Marshal(m)
	if err != nil {
		return err
	}
	return l.Keep(keptMove, text)
}

// finishMove gives a service whose change of engine was killed its members, in the engine that it was published in last.
func finishMove(l *kernel.WriteLock) error {
	text, err := l.Kept(keptMove)
	if err != nil || text == nil {
		return err
	}
	var m engineMove
	if err := json.Unmarshal(text, &m); err != nil {
		return errors.Join(fmt.Errorf("what a killed change of engine left: %w", err), l.Forget(keptMove))
	}
	err = m.finish(l)
	if errors.Is(err, kernel.ErrNotExist) || errors.Is(err, ErrNetnsGone) {
		err = nil // the service is gone, or its engine, which apply makes anew
	}
	if err != nil {
		return fmt.Errorf("service %s, whose change of engine was killed: %w", m.Service, err)
	}
	kernel.Step("steer:move finished")
	return l.Forget(keptMove)
}

func (m engineMove) finish(l *kernel.WriteLock) error {
	p, err := readService(l.Root, serviceInstance(m.Scope, m.Service))
	if err != nil {
		return err
	}
	if err := freeSockets(l, m.Scope, p.Engine); err != nil {
		return err
	}
	e, err := openEngine(l, m.Scope, p.Engine)
	if err != nil {
		return err
	}
	defer e.Close()
	return m.admit(l, e, e.services[m.Service])
}

// freeSockets has all engines of a namespace but one let go of sockets that are no longer
// theirs, so that the one can take them.
func freeSockets(l *kernel.WriteLock, scope string, keep Engine) error {
	for _, kind := range kinds {
		if kind == keep {
			continue
		}
		e, err := openEngine(l, scope, kind)
		if errors.Is(err, kernel.ErrNotExist) {
			continue
		} else if err != nil {
			return err
		}
		err = errors.Join(e.sync(), e.removeIdle())
		e.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

// admit gives the slots that are empty to the members that had them.
func (m engineMove) admit(l *kernel.WriteLock, e *engine, p *published) error {
	ns, err := e.openNetns()
	if err != nil {
		return err
	}
	defer ns.Close()
	now, err := e.heldSlots(p)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	e.coming = map[int]heldSlot{}
	for slot, h := range m.Held {
		who, err := processOf(h.Member.PID)
		if _, has := now[slot]; has || slot >= p.Service.Slots || err != nil || who.start != h.Start {
			continue
		}
		e.coming[slot] = heldSlot{h.Member, h.Counts}
	}
	for slot := range maps.Keys(e.coming) {
		if err := e.admitHeld(ctx, p, slot, ns); err != nil && !notYet(err) {
			return err
		}
	}
	if onEmpty := m.OnEmpty[p.Engine]; onEmpty != "" && onEmpty != p.Service.OnEmpty {
		final, err := changed(l.Root, m.Scope, p, func(p *published) error { p.Service.OnEmpty = onEmpty; return nil })
		if err != nil {
			return err
		}
		return e.replace(final, p, nil)
	}
	return nil
}
