// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/internal/pidfd"
	"github.com/weir-project/weir/kernel"
	"golang.org/x/sys/unix"
)

// Retirement ends the generation before a slot's member, once nothing is left with
// it: no UDP peer that it knows, no connection in its listeners' queues or on the
// way there, no TCP connection, no datagram unread. At the deadline it ends whatever
// is left, but for what waits in its sockets.
type Retirement struct {
	Slot   slots.Slot
	Signal syscall.Signal // that ends the process; 0: the one by which its program ends in good order
	Keep   bool           // leave the process be, once it is drained
	Log    feature.Logger
}

const (
	// drainPoll is how often a retirement looks, at first; slower later on.
	drainPoll    = 20 * time.Millisecond
	maxDrainPoll = 500 * time.Millisecond
	// drainLast is how long the process has at most, once it gets nothing new, for what
	// waits in its sockets.
	drainLast = 2 * time.Second
	// drainGrace is for what it has read and not answered yet.
	drainGrace = 50 * time.Millisecond
)

// retiring is a running Retirement: of one process, whatever becomes of the slot.
type retiring struct {
	Retirement
	root    *kernel.Root
	who     slots.Process
	cookies map[uint64]bool // of its sockets
	until   uint64          // CLOCK_MONOTONIC, ns: its time
	back    bool            // the slot is its own again
}

// Run waits, and ends the process. It returns at once where nobody drains.
func (t Retirement) Run(ctx context.Context, r *kernel.Root) error {
	v := &retiring{Retirement: t, root: r}
	now, err := v.read()
	if err != nil || !v.who.Alive() {
		return err
	}
	proc, err := pidfd.Open(v.who.PID)
	if err != nil {
		return nil //nolint:nilerr // it has exited
	}
	defer proc.Close()
	if !v.who.Alive() { // its number was another's before it was opened
		return nil
	}
	t.Log.Info("the generation before is drained", "service", t.Slot.Service, "slot", t.Slot.Slot, "pid", v.who.PID, "until", kernel.WallTime(v.until).Format(time.TimeOnly))
	if err := v.drained(ctx, now, proc); err != nil || !proc.Alive() {
		return err
	}
	if err := v.close(ctx); err != nil {
		return err
	}
	if v.back {
		t.Log.Warn("the slot is the generation's before again: it is not ended", "service", t.Slot.Service, "slot", t.Slot.Slot, "pid", v.who.PID)
	}
	if v.back || t.Keep {
		return nil
	}
	sig := t.Signal
	if sig == 0 {
		sig = gracefulSignal(v.who.PID)
	}
	if err := unix.PidfdSendSignal(proc.FD(), sig, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("ending process %d: %w", v.who.PID, err)
	}
	t.Log.Info("the generation before ends", "service", t.Slot.Service, "slot", t.Slot.Slot, "pid", v.who.PID, "signal", sig)
	return nil
}

// drained waits until nothing is left, or the deadline.
func (v *retiring) drained(ctx context.Context, now slots.Remaining, proc *pidfd.Process) (err error) {
	opening := now.Opening // SYNs that were answered before the change: their queue is the old one
	clean := 0
	for wait := drainPoll; proc.Alive() && !v.back; wait = min(wait+wait/8, maxDrainPoll) {
		for remote := range opening {
			if !now.Opening[remote] {
				delete(opening, remote)
			}
		}
		// Twice, for a look is no snapshot: a connection that is accepted while it lasts may be seen
		// neither in the queue nor with the process.
		if now.Peers+now.Waiting+now.Sessions+int(now.Unread)+len(opening) > 0 {
			clean = 0
		} else if clean++; clean == 2 {
			return nil
		} else {
			wait = drainPoll
		}
		if kernel.Monotonic() >= v.until {
			v.Log.Warn("the deadline ends what is left", "service", v.Slot.Service, "slot", v.Slot.Slot, "pid", v.who.PID, "sessions", now.Sessions, "waiting", now.Waiting)
			return nil
		}
		if err := slots.Sleep(ctx, min(wait, time.Duration(max(int64(v.until-kernel.Monotonic()), 0))+time.Millisecond)); err != nil {
			return err
		}
		if now, err = v.read(); err != nil {
			return err
		}
	}
	return nil
}

// close has it get nothing more, and waits for what is in its sockets.
func (v *retiring) close(ctx context.Context) error {
	if err := v.endDraining(ctx); err != nil || v.back {
		return err
	}
	for last := time.Now().Add(drainLast); time.Now().Before(last); {
		now, err := v.read()
		if err != nil || now.Waiting+int(now.Unread) == 0 {
			break
		}
		if err := slots.Sleep(ctx, drainPoll); err != nil {
			return err
		}
	}
	return slots.Sleep(ctx, drainGrace)
}

// endDraining makes this instant the end of its time, unless the slot is its own again.
func (v *retiring) endDraining(ctx context.Context) error {
	l, err := v.root.Lock(ctx)
	if err != nil {
		return err
	}
	defer l.Unlock()
	e, p, err := engine.OpenSlot(l, v.Slot)
	if err != nil {
		return err
	}
	defer e.Close()
	holder, err := slots.ProcessIn(e.Pins, p.Row(v.Slot.Slot))
	if err != nil {
		return err
	}
	v.back = holder == v.who
	d, err := slots.ReadPredecessor(e.Pins, p, v.Slot.Slot)
	if err != nil || d.Who != v.who || d.Over() {
		return err
	}
	d.Until = kernel.Monotonic()
	return e.Pins.Maps["gens"].Put(d.Row, d.SteerGeneration)
}

// read reads what is left with the process: the first time with whoever drains.
func (v *retiring) read() (l slots.Remaining, err error) {
	s, err := state.ReadService(v.root, record.Instance(v.Slot.Scope, v.Slot.Service))
	if err != nil {
		return l, err
	}
	if s.Record.Service.Generations == nil {
		return l, fmt.Errorf("service %s has no generations: add generations: {} to its steer section, and apply", s.Name)
	}
	if v.Slot.Slot < 0 || v.Slot.Slot >= s.Record.Service.Slots {
		return l, fmt.Errorf("%w: %s has slots 0 to %d", record.ErrNoSlot, s.Name, s.Record.Service.Slots-1)
	}
	e, err := v.root.Open(s.Record.EngineInstance(s.PinScope), s.Record.ReaderMaps()...)
	if err != nil {
		return l, err
	}
	defer e.Close()
	d, err := slots.ReadPredecessor(e, s.Record, v.Slot.Slot)
	if err != nil {
		return l, err
	}
	if v.who.PID == 0 {
		if v.who = d.Who; d.Who.PID == 0 {
			return l, nil
		}
		v.cookies = s.CookiesIn(e, d.Row)
	}
	holder, err := slots.ProcessIn(e, s.Record.Row(v.Slot.Slot))
	if err != nil {
		return l, err
	}
	v.back = holder == v.who
	if l, err = s.Remaining(v.cookies, v.who.PID); err != nil || d.Who != v.who {
		return l, err // another generation came: the program gives this one nothing any more
	}
	if v.until = d.Until; d.Over() {
		return l, nil
	}
	o, err := v.root.Open(record.Instance(s.PinScope, s.Name), "peers")
	if err != nil {
		return l, err
	}
	defer o.Close()
	peers, err := slots.CountPeers(o.Maps["peers"], d.Idle)
	l.Peers = peers[d.Row]
	return l, err
}
