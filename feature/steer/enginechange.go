// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

// readerWait is the maximum wait for blocked readers during a change of engine. Meanwhile the kernel alone chooses. A
// reader releases its socket with its next datagram.
const readerWait = time.Second

// errReader means that a blocked reader keeps a socket in the maps of the previous engine.
var errReader = errors.New("a reader keeps the socket")

// changeEngine moves a service to another engine. A socket can be in the maps of only one engine, so in between the
// kernel alone chooses. After an error the service is back in the previous engine, with its members.
func (t target) changeEngine(ctx context.Context, l *kernel.WriteLock) error {
	if t.batch != nil {
		if err := t.batch.forget(t.scope); err != nil {
			return err
		}
		t.batch = nil
	}
	was, err := record.Read(l.Root, record.Instance(t.scope, t.service.Name))
	if err != nil {
		return err
	}
	from, err := engine.OpenEngine(l, t.scope, was.Engine)
	if err != nil {
		return err
	}
	defer from.Close()
	ns, err := slots.OpenNetns(t.netns, t.id)
	if err != nil {
		return err
	}
	defer ns.Close()
	held, err := from.ServedSlots(was)
	if err != nil {
		return err
	}
	if err := t.keepMove(l, was, held); err != nil {
		return err
	}
	kernel.Step("steer:move kept")
	t.served = maps.Clone(held)
	maps.DeleteFunc(t.served, func(slot int, _ engine.ServedSlot) bool { // the plan reported these slots, and was allowed
		return slot >= t.service.Slots || slot < len(t.empty) && t.empty[slot] != nil
	})
	if err := t.republish(ctx, from, was, ns); err != nil {
		t.served = held
		if back := t.comeBack(l, from, was, ns); back != nil {
			return errors.Join(err, fmt.Errorf("return service %s to engine %s: %w", was.Service.Name, was.Engine, back))
		}
		return errors.Join(fmt.Errorf("the service keeps engine %s: %w", was.Engine, err), l.Forget(engine.KeptMove))
	}
	if err := from.Mark(false); err != nil {
		return err
	}
	return errors.Join(from.RemoveIdle(), l.Forget(engine.KeptMove))
}

// republish removes a service from its engine and publishes it in the other one.
func (t target) republish(ctx context.Context, from *engine.Engine, was *record.Service, ns *netns.Handle) error {
	if err := from.Mark(true); err != nil {
		return err
	}
	from.Drop(was.Service.Name)
	if err := from.ReconcileMaps(); err != nil {
		return err
	}
	if err := kernel.Try("steer:left"); err != nil {
		return err
	}
	if err := t.readersGone(ctx, ns); err != nil {
		return err
	}
	t.from = was
	return t.publish(ctx, from.Lock)
}

// comeBack returns a service to its previous engine: first its members, then the ports that lead to them.
func (t target) comeBack(l *kernel.WriteLock, from *engine.Engine, was *record.Service, ns *netns.Handle) error {
	from.Services[was.Service.Name] = was
	now, err := record.Read(l.Root, record.Instance(t.scope, was.Service.Name))
	if err == nil && now.Engine == was.Engine {
		now = nil // not published in the other engine
	}
	if now != nil {
		err = from.PublishService(was)
	}
	if err != nil {
		return err
	}
	if err := engine.FreeSockets(l, t.scope, was.Engine); err != nil {
		return err
	}
	// An interrupted command must not leave a service without its members, so use a new context.
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	from.Coming = t.served
	var errs []error
	for slot := range was.Rows {
		errs = append(errs, from.AdmitServed(ctx, was, slot, ns))
	}
	return errors.Join(append(errs, from.Reconcile())...)
}

// readersGone waits until no reader keeps a UDP socket in its previous socket map. udp_bpf_recvmsg holds a reference
// while it waits. Until then a reuseport array rejects the socket.
func (t target) readersGone(ctx context.Context, ns *netns.Handle) error {
	if kind, _, err := record.ChooseEngine(t.service, t.from); err != nil || kind != spec.EngineReuseport {
		return err
	}
	probe, err := ebpf.NewMap(&ebpf.MapSpec{Name: "steer_probe", Type: ebpf.ReusePortSockArray, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	if err != nil {
		return err
	}
	defer probe.Close()
	ctx, cancel := context.WithTimeout(ctx, readerWait)
	defer cancel()
	for _, slot := range slices.Sorted(maps.Keys(t.served)) {
		a, err := t.served[slot].Member.Adopt(ctx, ns, t.service.Spec)
		if errors.Is(err, service.ErrNotRunning) {
			continue
		} else if err != nil {
			return fmt.Errorf("slot %d: %w", slot, err)
		}
		for _, s := range a.Sockets {
			if err = readerGone(ctx, probe, s); err != nil {
				break
			}
		}
		a.Close()
		if err != nil {
			return fmt.Errorf("slot %d: %w", slot, err)
		}
	}
	return nil
}

func readerGone(ctx context.Context, probe *ebpf.Map, s service.Adopted) error {
	for {
		err := probe.Put(uint32(0), uint64(s.FD))
		if err == nil {
			return probe.Delete(uint32(0))
		}
		if !errors.Is(err, unix.EBUSY) {
			return engine.ExplainSocket(s, err)
		}
		select {
		case <-ctx.Done():
			if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return ctx.Err()
			}
			return fmt.Errorf("%w: process %d waits in a read of %s, so the kernel keeps the socket in the maps of the previous engine until the next datagram: apply again while datagrams arrive, or restart the process", errReader, s.PID, s.Endpoint)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// keepMove records the service and its members.
func (t target) keepMove(l *kernel.WriteLock, was *record.Service, held map[int]engine.ServedSlot) error {
	m := engine.EngineMove{Scope: t.scope, Service: t.service.Name, OnEmpty: map[spec.Engine]spec.OnEmpty{was.Engine: was.Service.OnEmpty}, Served: map[int]engine.MovedSlot{}}
	for _, kind := range record.Engines {
		if kind != was.Engine {
			m.OnEmpty[kind] = t.service.OnEmpty
		}
	}
	for slot, h := range held {
		who, err := slots.FindProcess(h.Member.PID)
		if err != nil {
			continue // it has just exited
		}
		m.Served[slot] = engine.MovedSlot{Member: h.Member, Start: who.Start, Counts: h.Counts}
	}
	text, err := json.Marshal(m)
	if err != nil {
		return err
	}
	return l.Keep(engine.KeptMove, text)
}
