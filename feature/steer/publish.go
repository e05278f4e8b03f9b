// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// publish creates or changes a service.
func (t target) publish(ctx context.Context, l *kernel.WriteLock) error {
	if err := t.vet(l); err != nil {
		return err
	}
	ns, err := openNetns(t.netns, t.id)
	if err != nil {
		return err
	}
	defer ns.Close()
	was, err := readService(l.Root, serviceInstance(t.scope, t.service.Name))
	if err != nil && !errors.Is(err, kernel.ErrNotExist) {
		return err
	}
	kind, why, err := chooseEngine(t.service, was)
	if err != nil {
		return err
	}
	e, done, err := t.openEngine(l, ns, kind)
	if err != nil {
		return err
	}
	defer done()
	e.rate, e.coming = t.rate, t.held
	old := e.services[t.service.Name]
	if t.from == nil {
		t.from = was // of the other engine, if it is not old
	}
	p, err := t.next(e, old)
	if err != nil {
		return err
	}
	p.Engine, p.Why = kind, why
	onEmpty := p.Service.OnEmpty
	if len(t.held) > 0 && kind == EngineReuseport {
		p.Service.OnEmpty = Pass // until its members are there: see admitAll
	}
	if err := e.putInPlace(ctx, p, old, ns, t.rate); err != nil {
		return err
	}
	if t.batch != nil {
		return t.inBatch(e, p, old)
	}
	if err := e.sync(); err != nil {
		return err
	}
	if err := kernel.Try("steer:synced"); err != nil {
		return err
	}
	if p.Service.OnEmpty != onEmpty {
		if p, err = e.admitAll(ctx, p, onEmpty, ns); err != nil {
			return err
		}
	}
	if err := syncBind(l, p.Service.SharePort); err != nil {
		return err
	}
	// The other service may be the one that is copied, and have come before this one.
	if err := syncCopies(l, t.scope, true); err != nil || kind == EngineSkLookup && p.Service.OnEmpty != Drop {
		return err
	}
	return e.startHolder()
}

// vet says what this kernel cannot do for the service, and removes what is pinned of namespaces that are gone: before anything changes.
func (t target) vet(l *kernel.WriteLock) error {
	if t.service.SharePort {
		if err := kernel.BindShare.Check(); err != nil {
			return fmt.Errorf("service %s, share_port: %w", t.service.Name, err)
		}
	}
	if t.batch != nil && t.batch.vetted {
		return nil
	}
	if err := CleanStale(l); err != nil {
		return err
	}
	if t.batch != nil {
		t.batch.vetted = true
	}
	return nil
}

// putInPlace publishes a service in place of old. A kill at any step of it is recovered from the mark.
func (e *engine) putInPlace(ctx context.Context, p, old *published, ns *netns.Handle, rate *Rate) error {
	if err := e.mark(true); err != nil {
		return err
	}
	if err := kernel.Try("steer:marked"); err != nil {
		return err
	}
	if err := e.prepareRows(ctx, p, old, ns); err != nil {
		return err
	}
	if err := kernel.Try("steer:prepared"); err != nil {
		return err
	}
	if p.misplaces(old) {
		if err := e.owe(p, rate); err != nil {
			return err
		}
	}
	if err := e.publishService(p); err != nil {
		return err
	}
	return kernel.Try("steer:published")
}

// inBatch is what a service needs before the batch settles.
func (t target) inBatch(e *engine, p, old *published) error {
	if err := e.syncOne(p, old); err != nil {
		return err
	}
	if err := kernel.Try("steer:synced"); err != nil || e.kind == EngineReuseport || p.Service.OnEmpty != Drop {
		return err
	}
	return e.startHolder()
}

// openEngine opens the engine of the service, and makes it where there is none.
func (t target) openEngine(l *kernel.WriteLock, ns *netns.Handle, kind Engine) (e *engine, done func(), err error) {
	shared := t.batch != nil
	open := func() (*engine, error) {
		if shared {
			return t.batch.engine(l, t.scope, kind)
		}
		return openEngine(l, t.scope, kind)
	}
	e, err = open()
	if errors.Is(err, kernel.ErrNotExist) {
		if err = publishEngine(l, ns, kind, 0); err != nil {
			return nil, nil, err
		}
		kernel.Step("steer:engine")
		e, err = open()
	}
	if err != nil {
		return nil, nil, err
	}
	if shared {
		return e, func() {}, nil
	}
	return e, e.Close, nil
}

// next is the published form of t. Slots that stay keep their rows, and so their
// members and counts. Where the endpoints' numbers would mean other sockets to a
// packet that is on its way, everything is new.
func (t target) next(e *engine, old *published) (*published, error) {
	p := &published{Service: t.service, Netns: t.netns}
	if from := t.inherits(old); p.Service.Seed == nil && from != nil {
		p.Service.Seed = from.Service.Seed
	} else if p.Service.Seed == nil {
		p.Service.Seed = randomSeed()
	}
	p.setDevices(t.devices)
	p.shape(t.inherits(old))
	if t.was != nil {
		t.was.shape(p, t.inherits(old))
	}
	var err error
	if old != nil && sameEndpoints(p, old) {
		p.ID = old.ID
		p.Rows = slices.Clone(old.Rows[:min(len(old.Rows), p.Service.Slots)])
	} else if p.ID, err = e.freeID(); err != nil {
		return nil, err
	} else if err = e.dropDevices(map[uint32]bool{p.ID: true}); err != nil { // of whoever had it, should a killed command have left them
		return nil, err
	}
	more, err := e.freeRows(p.Service.Slots - len(p.Rows))
	p.Rows = append(p.Rows, more...)
	if err != nil {
		return nil, err
	}
	return p, e.spareRows(p, old)
}

func sameEndpoints(a, b *published) bool {
	return slices.Equal(a.Service.Endpoints(), b.Service.Endpoints())
}

// prepareRows adopts the members of slots that get new rows before any packet is
// sent there, so that the change costs nobody a packet. A member that is not
// whole now is looked for again once the service stands.
func (e *engine) prepareRows(ctx context.Context, p, old *published, ns *netns.Handle) error {
	for _, row := range p.Spare {
		if old != nil && slices.Contains(old.Spare, row) {
			continue
		}
		if err := e.clearRow(row, bpf.SteerSlot{}); err != nil {
			return err
		}
	}
	for slot, row := range p.Rows {
		if old != nil && slices.Contains(old.Rows, row) {
			continue
		}
		var s bpf.SteerSlot
		if err := e.pins.Maps["slots"].Lookup(row, &s); err != nil {
			return err
		}
		err := e.clearRow(row, s)
		if err != nil {
			return err
		}
		if old == nil && e.kind == EngineSkLookup {
			err = e.admitHeld(ctx, p, slot, ns)
		}
		if err != nil {
			return err
		}
		if old == nil {
			continue
		}
		if m := e.heir(p, old, slot); m != nil {
			if _, err := e.admit(ctx, p, slot, *m, ns); err != nil && !notYet(err) {
				return err
			}
		}
		if slot < old.Service.Slots {
			if err := e.carryCounts(row, old.row(slot)); err != nil {
				return err
			}
		}
	}
	return nil
}

// carryCounts keeps a slot's counters when it moves to another row, so that
// they only ever rise.
func (e *engine) carryCounts(to, from uint32) error {
	m := e.pins.Maps["verdicts"]
	for proto := range uint32(2) {
		var v []bpf.SteerVerdicts
		if err := m.Lookup(from*2+proto, &v); err != nil {
			return err
		}
		if err := m.Put(to*2+proto, v); err != nil {
			return err
		}
	}
	return nil
}

func randomSeed() *uint32 {
	var b [4]byte
	rand.Read(b[:]) // never fails (crypto/rand)
	seed := binary.NativeEndian.Uint32(b[:])
	return &seed
}
