// SPDX-License-Identifier: Apache-2.0

package bindings

import (
	"errors"
	"fmt"

	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/table"
)

// roomFor returns the smallest capacity for n bindings.
func roomFor(n int) int {
	room := engine.FewestBindings
	for room < n {
		room *= 4
	}
	return room
}

// dispatch is the bindings of a namespace and their services, open for writing.
type dispatch struct {
	*engine.Engine
	ns     *netns.Handle
	bound  *table.Bindings
	labels *engine.Labels

	acquired map[uint32]bool // numbers returned by acquire
	free     []uint32        // numbers that freeNumber may return
}

// openDispatch opens the dispatch of a namespace, with capacity for at least room bindings. If necessary it creates the
// engine or moves it to larger maps.
func openDispatch(l *kernel.WriteLock, ns *netns.Handle, room int) (*dispatch, error) {
	if room > table.MaxBindings {
		return nil, fmt.Errorf("%w: the maximum is %d per namespace", table.ErrFull, table.MaxBindings)
	}
	if err := engine.CleanStale(l); err != nil {
		return nil, err
	}
	scope := record.Scope(ns)
	e, err := engine.OpenEngine(l, scope, spec.EngineSkLookup)
	switch {
	case errors.Is(err, kernel.ErrNotExist):
		err = engine.PublishEngine(l, ns, spec.EngineSkLookup, room)
	case err == nil && engine.Room(e.Pins.Maps) < room:
		e.Close()
		err = engine.RebuildEngine(l, scope, spec.EngineSkLookup, room)
	case err == nil:
		return newDispatch(e, ns)
	}
	if err != nil {
		return nil, err
	}
	kernel.Step("steer:room made")
	if e, err = engine.OpenEngine(l, scope, spec.EngineSkLookup); err != nil {
		return nil, err
	}
	return newDispatch(e, ns)
}

// openDispatchThere opens an existing dispatch. It returns ErrNotExist if the namespace never had a binding.
func openDispatchThere(l *kernel.WriteLock, ns *netns.Handle) (*dispatch, error) {
	if err := engine.CleanStale(l); err != nil {
		return nil, err
	}
	e, err := engine.OpenEngine(l, record.Scope(ns), spec.EngineSkLookup)
	if err != nil {
		return nil, err
	}
	if engine.Room(e.Pins.Maps) == 0 {
		e.Close()
		return nil, fmt.Errorf("namespace %s: %w", ns, kernel.ErrNotExist)
	}
	return newDispatch(e, ns)
}

func newDispatch(e *engine.Engine, ns *netns.Handle) (_ *dispatch, err error) {
	d := &dispatch{Engine: e, ns: ns, labels: &engine.Labels{Maps: e.Pins.Maps}, acquired: map[uint32]bool{}}
	if d.bound, err = engine.OpenBound(e.Pins.Maps, true); err == nil {
		err = d.recoverCounts()
	}
	if err != nil {
		d.Close()
		return nil, err
	}
	return d, nil
}

func (d *dispatch) Close() {
	if d.bound != nil {
		d.bound.Close()
	}
	d.Engine.Close()
}

// change runs f, a change of bindings and counts. After a kill in f, the next opening counts again.
func (d *dispatch) change(f func() error) error {
	if err := d.labels.Mark(true); err != nil {
		return err
	}
	if err := f(); err != nil {
		return errors.Join(err, d.recount())
	}
	return d.labels.Mark(false)
}

// recoverCounts corrects the counts after a killed command.
func (d *dispatch) recoverCounts() error {
	marked, err := d.labels.Marked()
	if err != nil || !marked {
		return err
	}
	return d.recount()
}

// recount counts the bindings per service.
func (d *dispatch) recount() error {
	counts := map[uint32]uint32{}
	for x, err := range d.bound.All() {
		if err != nil {
			return err
		}
		counts[x.Value-1]++
	}
	if err := d.count(counts); err != nil {
		return err
	}
	return d.labels.Mark(false)
}

// removeIdle removes an engine without services, bindings and sockets.
func (d *dispatch) removeIdle() error {
	if !d.Idle() || d.bound.Len() > 0 {
		return nil
	}
	used, err := d.Dispatches()
	if err != nil || used {
		return err
	}
	if err := engine.RemoveTemplates(d.Lock, d.Scope); err != nil {
		return err
	}
	return d.Lock.Remove(record.EngineInstance(d.Scope, d.Kind))
}

// KindName returns the name of a kind of socket: tcp4, udp6 and so on.
func KindName(kind uint32) string {
	return [engine.KindsIPv4]string{"udp4", "tcp4", "udp6", "tcp6"}[kind]
}
