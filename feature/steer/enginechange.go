// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

// readerWait is how long a change of engine waits for readers to let go of their sockets. The kernel alone chooses
// meanwhile, so a reader lets go with its next datagram.
const readerWait = time.Second

// ErrReader says that a blocked reader keeps a socket in the maps of the former engine.
var ErrReader = errors.New("a reader holds the socket")

// heldSlot is a member that serves a slot of a service whose engine changes, and what it has counted.
type heldSlot struct {
	member service.Member
	counts [2][]bpf.SteerVerdicts
}

// changeEngine moves a service to another engine. A socket is in the maps of one engine only: between the two the
// kernel alone chooses. Whatever fails, the service is back in the former engine, with its members.
func (t target) changeEngine(ctx context.Context, l *kernel.WriteLock) error {
	if t.batch != nil {
		if err := t.batch.forget(t.scope); err != nil {
			return err
		}
		t.batch = nil
	}
	was, err := readService(l.Root, serviceInstance(t.scope, t.service.Name))
	if err != nil {
		return err
	}
	from, err := openEngine(l, t.scope, was.Engine)
	if err != nil {
		return err
	}
	defer from.Close()
	ns, err := openNetns(t.netns, t.id)
	if err != nil {
		return err
	}
	defer ns.Close()
	held, err := from.heldSlots(was)
	if err != nil {
		return err
	}
	if err := t.keepMove(l, was, held); err != nil {
		return err
	}
	kernel.Step("steer:move kept")
	t.held = maps.Clone(held)
	maps.DeleteFunc(t.held, func(slot int, _ heldSlot) bool { // the plan has said so, and was allowed to
		return slot >= t.service.Slots || slot < len(t.empty) && t.empty[slot] != nil
	})
	if err := t.leave(ctx, from, was, ns); err != nil {
		t.held = held
		if back := t.comeBack(l, from, was, ns); back != nil {
			return errors.Join(err, fmt.Errorf("service %s, back to engine %s: %w", was.Service.Name, was.Engine, back))
		}
		return errors.Join(fmt.Errorf("the service stays as it was, with engine %s: %w", was.Engine, err), l.Forget(keptMove))
	}
	if err := from.mark(false); err != nil {
		return err
	}
	return errors.Join(from.removeIdle(), l.Forget(keptMove))
}

// leave takes a service out of its engine, and publishes it in the other one.
func (t target) leave(ctx context.Context, from *engine, was *published, ns *netns.Handle) error {
	if err := from.mark(true); err != nil {
		return err
	}
	delete(from.services, was.Service.Name)
	if err := from.syncMaps(); err != nil {
		return err
	}
	if err := kernel.Try("steer:left"); err != nil {
		return err
	}
	if err := t.readersGone(ctx, ns); err != nil {
		return err
	}
	t.from = was
	return t.publish(ctx, from.lock)
}

// comeBack puts a service into its former engine again: its members first, then the ports that lead to them.
func (t target) comeBack(l *kernel.WriteLock, from *engine, was *published, ns *netns.Handle) error {
	from.services[was.Service.Name] = was
	now, err := readService(l.Root, serviceInstance(t.scope, was.Service.Name))
	if err == nil && now.Engine == was.Engine {
		now = nil // it was not published in the other engine
	}
	if now != nil {
		err = from.publishService(was)
	}
	if err != nil {
		return err
	}
	if err := freeSockets(l, t.scope, was.Engine); err != nil {
		return err
	}
	// The command may have been interrupted, which is no reason to leave a service without its members.
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	from.coming = t.held
	var errs []error
	for slot := range was.Rows {
		errs = append(errs, from.admitHeld(ctx, was, slot, ns))
	}
	return errors.Join(append(errs, from.sync())...)
}

// heldSlots are the members that serve a service now.
func (e *engine) heldSlots(p *published) (map[int]heldSlot, error) {
	out := map[int]heldSlot{}
	for slot, row := range p.Rows {
		who, err := processIn(e.pins, row)
		if err != nil {
			return nil, err
		}
		if now, err := processOf(who.pid); who.pid == 0 || err != nil || now != who {
			continue // empty, or its process has exited
		}
		h := heldSlot{member: *SlotState{Slot: slot, PID: who.pid}.holder(p.Service.Member(slot))}
		for proto := range uint32(2) {
			if err := e.pins.Maps["verdicts"].Lookup(row*2+proto, &h.counts[proto]); err != nil {
				return nil, err
			}
		}
		out[slot] = h
	}
	return out, nil
}

// admitHeld gives a slot to the member that had it in the other engine, with its counts.
func (e *engine) admitHeld(ctx context.Context, p *published, slot int, ns *netns.Handle) error {
	h, ok := e.coming[slot]
	if !ok {
		return nil
	}
	for proto := range uint32(2) {
		if err := e.pins.Maps["verdicts"].Put(p.row(slot)*2+proto, h.counts[proto]); err != nil {
			return err
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	e.vet = nil // it serves: it is ready
	if _, err := e.admit(ctx, p, slot, h.member, ns); err != nil && !errors.Is(err, service.ErrNotRunning) {
		return fmt.Errorf("slot %d: %w", slot, err)
	}
	return nil
}

// admitAll gives a service that was published in engine sk_reuseport its members. Groups are made one by one: on_empty is
// pass meanwhile, so that a packet for a member that is still to come reaches another one and not nobody.
func (e *engine) admitAll(ctx context.Context, p *published, onEmpty OnEmpty, ns *netns.Handle) (*published, error) {
	for slot := range p.Rows {
		if err := e.admitHeld(ctx, p, slot, ns); err != nil {
			return p, err
		}
	}
	if err := kernel.Try("steer:moved over"); err != nil {
		return p, err
	}
	final, err := changed(e.lock.Root, e.scope, p, func(p *published) error { p.Service.OnEmpty = onEmpty; return nil })
	if err != nil {
		return p, err
	}
	return final, e.replace(final, p, nil)
}

// readersGone waits until no reader keeps a UDP socket in the socket map that it has left: udp_bpf_recvmsg holds a
// reference for as long as it waits, and an array of reuseport sockets refuses the socket until then.
func (t target) readersGone(ctx context.Context, ns *netns.Handle) error {
	if kind, _, err := chooseEngine(t.service, t.from); err != nil || kind != EngineReuseport {
		return err
	}
	probe, err := ebpf.NewMap(&ebpf.MapSpec{Name: "steer_probe", Type: ebpf.ReusePortSockArray, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	if err != nil {
		return err
	}
	defer probe.Close()
	ctx, cancel := context.WithTimeout(ctx, readerWait)
	defer cancel()
	for _, slot := range slices.Sorted(maps.Keys(t.held)) {
		a, err := t.held[slot].member.Adopt(ctx, ns, t.service.Spec)
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
			return explainSocket(s, err)
		}
		select {
		case <-ctx.Done():
			if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return ctx.Err()
			}
			return fmt.Errorf("%w: process %d waits in a read of %s, and the kernel keeps the socket in the maps of the former engine until the next datagram: apply again while datagrams arrive, or restart the process with the new engine", ErrReader, s.PID, s.Endpoint)
		case <-time.After(10 * time.Millisecond):
		}
	}
}
