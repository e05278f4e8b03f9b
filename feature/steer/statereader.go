// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
)

// ReadState reads every steered service from the pins alone.
func ReadState(ctx context.Context, r *kernel.Root) (State, error) {
	reader := newStateReader(r)
	defer reader.Close()
	reader.whole = true
	return reader.read(ctx)
}

// stateReader reads the state of steering, the next time with less work: what is
// pinned is replaced as a whole or not at all, so that all but the slots is read
// once. Whoever reads it every second, as weir serve does, would otherwise take
// more of the CPU than the traffic of a small host.
type stateReader struct {
	root *kernel.Root
	// whole adds what only people want to know: counters, queues, outdated programs.
	whole    bool
	services map[kernel.Instance]*seenService
	engines  map[kernel.Instance]*kernel.Opened
}

// seenService is a service as it was published, and the directory of its pins.
type seenService struct {
	ServiceState
	pins *kernel.Opened
}

func newStateReader(r *kernel.Root) *stateReader {
	return &stateReader{root: r, services: map[kernel.Instance]*seenService{}, engines: map[kernel.Instance]*kernel.Opened{}}
}

// Close closes what was kept open.
func (r *stateReader) Close() {
	for i, e := range r.engines {
		e.Close()
		delete(r.engines, i)
	}
	clear(r.services)
}

// read reads what is there now. What it returns is not to be changed: the next
// reading returns parts of it again.
func (r *stateReader) read(ctx context.Context) (State, error) {
	all, err := r.root.Instances(spec.Name)
	if err != nil {
		return State{}, err
	}
	r.forget(all)
	st := State{Services: []ServiceState{}, root: r.root}
	if r.whole {
		if st.Outdated, err = outdated(r.root, all); err != nil {
			return State{}, err
		}
		if st.Bound, err = readDispatch(r.root, all); err != nil {
			return State{}, err
		}
	}
	for _, i := range all {
		if !kernel.ValidName(i.Name) {
			continue
		}
		s, err := r.service(i)
		if errors.Is(err, kernel.ErrNotExist) {
			continue
		} else if err != nil {
			return State{}, err
		}
		st.Services = append(st.Services, s)
		if ctx.Err() != nil {
			return State{}, ctx.Err()
		}
	}
	st.noteOthers()
	slices.SortFunc(st.Services, func(a, b ServiceState) int {
		return strings.Compare(a.Name+" "+a.Netns, b.Name+" "+b.Netns)
	})
	return st, nil
}

// forget drops what is gone or was replaced.
func (r *stateReader) forget(all []kernel.Instance) {
	for i, s := range r.services {
		if !slices.Contains(all, i) || s.pins.Replaced() {
			delete(r.services, i)
		}
	}
	for i, e := range r.engines {
		if !slices.Contains(all, i) || e.Replaced() {
			e.Close()
			delete(r.engines, i)
		}
	}
}

// service reads one service.
func (r *stateReader) service(i kernel.Instance) (ServiceState, error) {
	seen := r.services[i]
	if seen == nil {
		var err error
		if seen, err = readSeen(r.root, i); err != nil {
			return ServiceState{}, err
		}
		r.services[i] = seen
	}
	s := seen.ServiceState
	s.Updated = time.Now()
	e, err := r.engine(record.EngineInstance(i.Scope, s.Engine))
	if errors.Is(err, kernel.ErrNotExist) {
		s.Problem = problemEngine
		return s, nil
	} else if err != nil {
		return s, err
	}
	s.Inode, s.table = e.Meta.Inode, s.pub.Table
	if err := s.readSlots(e, r.whole); err != nil {
		return s, err
	}
	if r.whole {
		s.addQueues()
		s.addShared(r.root)
		s.addCopies(r.root)
		if err := s.addDraining(e); err != nil {
			return s, err
		}
	}
	if s.OnEmpty == spec.Drop || s.Engine == spec.EngineReuseport {
		held, err := engine.HeldIn(e, s.Engine)
		if err != nil {
			return s, err
		}
		if !held {
			s.Problem = problemHolder
		}
	}
	return s, nil
}

// readSeen reads what of a service stays until it is replaced.
func readSeen(r *kernel.Root, i kernel.Instance) (*seenService, error) {
	pins, err := r.Open(i, "service")
	if err != nil {
		return nil, err
	}
	pins.Close() // what matters is which directory it was
	p, err := record.Read(r, i)
	if err != nil {
		return nil, err
	}
	s := ServiceState{root: r, Name: i.Name, scope: i.Scope, Netns: p.Netns, By: p.Service.By, Engine: p.Engine, Why: p.Why, Seed: *p.Service.Seed,
		Buckets: spec.Buckets, OnEmpty: p.Service.OnEmpty, pub: p, eps: p.Service.Endpoints()}
	for _, l := range p.Service.Listen {
		s.Listen = append(s.Listen, l.String())
	}
	if err := s.addLive(r); err != nil {
		return nil, err
	}
	return &seenService{s, pins}, nil
}

func (r *stateReader) engine(i kernel.Instance) (*kernel.Opened, error) {
	if e := r.engines[i]; e != nil {
		return e, nil
	}
	maps := []string{"slots", "sockets", "verdicts", "sync", "sinks"}
	if kind, _ := record.EngineKind(i); kind == spec.EngineReuseport {
		maps = []string{"slots", "sockets", "verdicts", "sync", "groups", "holders"}
	}
	e, err := r.root.Open(i, append(maps, "gens")...)
	if errors.Is(err, kernel.ErrNotExist) { // of an engine, or of a weir, that has no generations
		e, err = r.root.Open(i, maps...)
	}
	if err == nil {
		r.engines[i] = e
	}
	return e, err
}

// readSlots judges every slot, and reads its counters if they are wanted.
func (s *ServiceState) readSlots(e *kernel.Opened, counters bool) error {
	held := make([]int, s.pub.Service.Slots)
	for _, slot := range s.table {
		held[slot]++
	}
	read := slots.Evaluate
	if counters {
		read = slots.Read
	}
	for n := range held {
		slot, err := read(e, s.pub, n)
		if err != nil {
			return fmt.Errorf("service %s, slot %d: %w", s.Name, n, err)
		}
		slot.Buckets = held[n]
		s.Slots = append(s.Slots, slot)
	}
	return nil
}

// ReadOne reads one service as it is now, without counters and queues. It wraps kernel.ErrNotExist where there is none.
func ReadOne(r *kernel.Root, scope, name string) (*ServiceState, error) {
	s, err := readServiceState(r, record.Instance(scope, name))
	if err != nil {
		return nil, err
	}
	return &s, nil
}

// readServiceState reads one service, without what only people want to know.
func readServiceState(r *kernel.Root, i kernel.Instance) (ServiceState, error) {
	reader := newStateReader(r)
	defer reader.Close()
	s, err := reader.service(i)
	if err != nil {
		return s, err
	}
	for _, kind := range record.Engines {
		beside, err := record.ReadAll(r, i.Scope, kind)
		if err != nil {
			return s, err
		}
		for name, p := range beside {
			if name != i.Name && !p.Bypassed {
				s.others = append(s.others, p.Service.Endpoints())
			}
		}
	}
	return s, nil
}
