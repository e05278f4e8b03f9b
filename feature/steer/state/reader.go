// SPDX-License-Identifier: Apache-2.0

package state

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

// Read reads every steered service from the pins.
func Read(ctx context.Context, r *kernel.Root) (State, error) {
	reader := NewReader(r)
	defer reader.Close()
	reader.whole = true
	return reader.Read(ctx)
}

// Reader reads the state of steering repeatedly. Pins are replaced atomically, so later readings read only the slots
// again. weir serve reads every second. Complete readings would cost more CPU than the traffic of a small host.
type Reader struct {
	root *kernel.Root
	// whole adds the parts for people: counters, queues, outdated programs.
	whole    bool
	services map[kernel.Instance]*seenService
	Engines  map[kernel.Instance]*kernel.Opened
}

// seenService is a published service and its pin directory.
type seenService struct {
	Service
	pins *kernel.Opened
}

// NewReader returns a reader of the pins below a root. It keeps maps open between readings. The caller closes it.
func NewReader(r *kernel.Root) *Reader {
	return &Reader{root: r, services: map[kernel.Instance]*seenService{}, Engines: map[kernel.Instance]*kernel.Opened{}}
}

// Close closes the open maps.
func (r *Reader) Close() {
	for i, e := range r.Engines {
		e.Close()
		delete(r.Engines, i)
	}
	clear(r.services)
}

// Read reads the current state. The caller must not change the result, because later results share parts of it.
func (r *Reader) Read(ctx context.Context) (State, error) {
	all, err := r.root.Instances(spec.Name)
	if err != nil {
		return State{}, err
	}
	r.forget(all)
	st := State{Services: []Service{}, Root: r.root}
	if r.whole {
		st.Outdated, st.Unreadable = ReadOutdated(r.root, all)
		if st.Bound, err = readDispatch(r.root, all); err != nil {
			return State{}, err
		}
	}
	for _, i := range all {
		if !kernel.ValidName(i.Name) {
			if r.whole && record.Shared.Is(i.Name) {
				if _, err := record.Shared.Read(r.root, i); err != nil && !errors.Is(err, kernel.ErrNotExist) {
					st.Unreadable.Add(i, err)
				}
			}
			continue
		}
		s, err := r.Service(i)
		switch {
		case err == nil:
			st.Services = append(st.Services, s)
		case errors.Is(err, kernel.ErrUnreadable):
			return State{}, err
		default:
			st.addUnread(i, err)
		}
		if ctx.Err() != nil {
			return State{}, ctx.Err()
		}
	}
	st.noteOthers()
	slices.SortFunc(st.Services, func(a, b Service) int {
		return strings.Compare(a.Name+" "+a.Netns, b.Name+" "+b.Netns)
	})
	return st, nil
}

// addUnread lists an unreadable service, unless it was removed meanwhile or its record describes it.
func (st *State) addUnread(i kernel.Instance, err error) {
	if errors.Is(err, kernel.ErrNotExist) {
		_, err = record.Read(st.Root, i)
	}
	if err != nil && !errors.Is(err, kernel.ErrNotExist) {
		st.Unreadable.Add(i, err)
	}
}

// forget closes removed and replaced instances.
func (r *Reader) forget(all []kernel.Instance) {
	for i, s := range r.services {
		if !slices.Contains(all, i) || s.pins.Replaced() {
			delete(r.services, i)
		}
	}
	for i, e := range r.Engines {
		if !slices.Contains(all, i) || e.Replaced() {
			e.Close()
			delete(r.Engines, i)
		}
	}
}

// Service reads one service.
func (r *Reader) Service(i kernel.Instance) (Service, error) {
	seen := r.services[i]
	if seen == nil {
		var err error
		if seen, err = readSeen(r.root, i); err != nil {
			return Service{}, err
		}
		r.services[i] = seen
	}
	s := seen.Service
	s.Updated = time.Now()
	e, err := r.engine(record.EngineInstance(i.Scope, s.Engine))
	if errors.Is(err, kernel.ErrNotExist) {
		s.Problem = ProblemEngine
		return s, nil
	} else if errors.Is(err, kernel.ErrABI) {
		s.Problem = problemUnread(err)
		return s, nil
	} else if err != nil {
		return s, err
	}
	s.Inode, s.Table = e.Meta.Inode, s.Record.Table
	if err := s.readSlots(e, r.whole); err != nil {
		return s, err
	}
	if r.whole {
		s.addQueues()
		s.addPosition(e)
		s.addShared(r.root)
		s.addCopies(r.root)
		if err := s.addDraining(e); err != nil {
			return s, err
		}
	}
	if s.OnEmpty == spec.Drop || s.Engine == spec.EngineReuseport {
		held, err := engine.SocketsHeld(e, s.Engine)
		if err != nil {
			return s, err
		}
		if !held {
			s.Problem = ProblemSocketHolder
		}
	}
	return s, nil
}

// readSeen reads the parts of a service that stay valid until it is replaced.
func readSeen(r *kernel.Root, i kernel.Instance) (*seenService, error) {
	pins, err := r.Open(i, "service")
	if err != nil {
		return nil, err
	}
	pins.Close() // only the identity of the directory is needed
	p, err := record.Read(r, i)
	if err != nil {
		return nil, err
	}
	s := Service{Root: r, Name: i.Name, PinScope: i.Scope, Netns: p.Netns, By: p.Service.By, Engine: p.Engine, EngineReason: p.Reason, Seed: *p.Service.Seed,
		Buckets: spec.Buckets, OnEmpty: p.Service.OnEmpty, Record: p, Endpoints: p.Service.Endpoints()}
	for _, l := range p.Service.Listen {
		s.Listen = append(s.Listen, l.String())
	}
	if err := s.addLive(r); err != nil {
		return nil, err
	}
	return &seenService{s, pins}, nil
}

func (r *Reader) engine(i kernel.Instance) (*kernel.Opened, error) {
	if e := r.Engines[i]; e != nil {
		return e, nil
	}
	maps := []string{"slots", "sockets", "verdicts", "sync", "sinks"}
	if kind, _ := record.EngineKind(i); kind == spec.EngineReuseport {
		maps = []string{"slots", "sockets", "verdicts", "sync", "groups", "holders"}
	}
	e, err := r.root.Open(i, append(maps, "gens")...)
	if errors.Is(err, kernel.ErrNotExist) { // the engine, or an older version, has no generations
		e, err = r.root.Open(i, maps...)
	}
	if err != nil {
		return nil, err
	}
	if err := e.Meta.RequireABI(i, record.ABI); err != nil {
		e.Close()
		return nil, err
	}
	r.Engines[i] = e
	return e, nil
}

// readSlots evaluates every slot, and reads its counters on request.
func (s *Service) readSlots(e *kernel.Opened, counters bool) error {
	held := make([]int, s.Record.Service.Slots)
	for _, slot := range s.Table {
		held[slot]++
	}
	read := slots.Evaluate
	if counters {
		read = slots.Read
	}
	for n := range held {
		slot, err := read(e, s.Record, n)
		if err != nil {
			return fmt.Errorf("service %s, slot %d: %w", s.Name, n, err)
		}
		slot.Buckets = held[n]
		s.Slots = append(s.Slots, slot)
	}
	return nil
}

// ReadOne reads one service without counters and queues. An error wraps kernel.ErrNotExist if it does not exist.
func ReadOne(r *kernel.Root, scope, name string) (*Service, error) {
	s, err := ReadService(r, record.Instance(scope, name))
	if err != nil {
		return nil, err
	}
	return &s, nil
}

// ReadService reads one service without counters and queues.
func ReadService(r *kernel.Root, i kernel.Instance) (Service, error) {
	reader := NewReader(r)
	defer reader.Close()
	s, err := reader.Service(i)
	if err != nil {
		return s, err
	}
	for _, kind := range record.Engines {
		beside, _, err := record.ReadAll(r, i.Scope, kind)
		if err != nil {
			return s, err
		}
		for name, p := range beside {
			if name != i.Name && !p.Bypassed {
				s.Others = append(s.Others, p.Service.Endpoints())
			}
		}
	}
	return s, nil
}
