// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/probe"
)

// publish creates or changes a service.
func (t target) publish(ctx context.Context, l *kernel.WriteLock) error {
	if err := t.vet(l); err != nil {
		return err
	}
	ns, err := slots.OpenNetns(t.netns, t.id)
	if err != nil {
		return err
	}
	defer ns.Close()
	was, err := record.Read(l.Root, record.Instance(t.scope, t.service.Name))
	if err != nil && !errors.Is(err, kernel.ErrNotExist) && !errors.Is(err, kernel.ErrDamaged) { // a damaged service is created again
		return err
	}
	kind, why, err := record.ChooseEngine(t.service, was)
	if err != nil {
		return err
	}
	e, done, err := t.openEngine(l, ns, kind)
	if err != nil {
		return err
	}
	defer done()
	e.Rate, e.Coming = t.rate, t.served
	old := e.Services[t.service.Name]
	if t.from == nil {
		t.from = was // in the other engine, if it is not old
	}
	p, err := t.next(e, old)
	if err != nil {
		return err
	}
	p.Engine, p.Reason = kind, why
	onEmpty := p.Service.OnEmpty
	if len(t.served) > 0 && kind == spec.EngineReuseport {
		p.Service.OnEmpty = spec.Pass // until its members are admitted: see AdmitAll
	}
	if err := e.PublishInPlace(ctx, p, old, ns, t.rate); err != nil {
		return err
	}
	if t.batch != nil {
		return t.inBatch(e, p, old)
	}
	if err := e.Reconcile(); err != nil {
		return err
	}
	if err := kernel.Try("steer:synced"); err != nil {
		return err
	}
	if p.Service.OnEmpty != onEmpty {
		if p, err = e.AdmitAll(ctx, p, onEmpty, ns); err != nil {
			return err
		}
	}
	if err := engine.ReconcileBind(l, p.Service.SharePort); err != nil {
		return err
	}
	// The copied service may have been published before this one, its target.
	if err := engine.ReconcileCopies(l, t.scope, true); err != nil || kind == spec.EngineSkLookup && p.Service.OnEmpty != spec.Drop {
		return err
	}
	return e.StartSocketHolder()
}

// vet checks that the kernel supports the service, and deletes pins of removed namespaces, before any change.
func (t target) vet(l *kernel.WriteLock) error {
	if t.service.SharePort {
		if err := probe.BindShare.Check(); err != nil {
			return fmt.Errorf("service %s, share_port: %w", t.service.Name, err)
		}
	}
	if t.batch != nil && t.batch.vetted {
		return nil
	}
	if err := engine.CleanStale(l); err != nil {
		return err
	}
	if t.batch != nil {
		t.batch.vetted = true
	}
	return nil
}

// inBatch does the work of a service that must precede the batch's reconciliation.
func (t target) inBatch(e *engine.Engine, p, old *record.Service) error {
	if err := e.ReconcileOne(p, old); err != nil {
		return err
	}
	if err := kernel.Try("steer:synced"); err != nil || e.Kind == spec.EngineReuseport || p.Service.OnEmpty != spec.Drop {
		return err
	}
	return e.StartSocketHolder()
}

// openEngine opens the engine of the service, or creates it.
func (t target) openEngine(l *kernel.WriteLock, ns *netns.Handle, kind spec.Engine) (e *engine.Engine, done func(), err error) {
	shared := t.batch != nil
	open := func() (*engine.Engine, error) {
		if shared {
			return t.batch.engine(l, t.scope, kind)
		}
		return engine.OpenEngine(l, t.scope, kind)
	}
	e, err = open()
	if errors.Is(err, kernel.ErrNotExist) {
		if err = engine.PublishEngine(l, ns, kind, 0); err != nil {
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

// next returns the new record of t. Remaining slots keep their rows, and with them members and counters. If the
// endpoint numbers change, id and rows are new: a packet in flight must not see the old numbers with new sockets.
func (t target) next(e *engine.Engine, old *record.Service) (*record.Service, error) {
	p := &record.Service{Service: t.service, Netns: t.netns}
	if from := t.inherits(old); p.Service.Seed == nil && from != nil {
		p.Service.Seed = from.Service.Seed
	} else if p.Service.Seed == nil {
		p.Service.Seed = randomSeed()
	}
	p.SetDevices(t.devices)
	p.Shape(t.inherits(old))
	if t.was != nil {
		t.was.shape(p, t.inherits(old))
	}
	var err error
	if old != nil && sameEndpoints(p, old) {
		p.ID = old.ID
		p.Rows = slices.Clone(old.Rows[:min(len(old.Rows), p.Service.Slots)])
	} else if p.ID, err = e.FreeID(); err != nil {
		return nil, err
	} else if err = e.DropDevices(map[uint32]bool{p.ID: true}); err != nil { // left by a killed command for the id's previous service
		return nil, err
	}
	more, err := e.FreeRows(p.Service.Slots - len(p.Rows))
	p.Rows = append(p.Rows, more...)
	if err != nil {
		return nil, err
	}
	return p, e.SpareRows(p, old)
}

func sameEndpoints(a, b *record.Service) bool {
	return slices.Equal(a.Service.Endpoints(), b.Service.Endpoints())
}

func randomSeed() *uint32 {
	var b [4]byte
	rand.Read(b[:]) // never fails (crypto/rand)
	seed := binary.NativeEndian.Uint32(b[:])
	return &seed
}
