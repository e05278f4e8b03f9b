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

// Retirement ends the previous generation of a slot once nothing remains: no known UDP peer, no connection in its
// listeners' queues or in the handshake, no TCP connection, no unread datagram. At the deadline it ends the remaining
// work, except data waiting in the sockets.
type Retirement struct {
	Slot   slots.Slot
	Signal syscall.Signal // ends the process; 0: the graceful signal of its program
	Keep   bool           // do not end the process after the drain
	Watch  bool           // wait for the exit of the process, however long it takes
	Log    feature.Logger
}

const (
	// drainPoll is the first polling interval. It grows up to maxDrainPoll.
	drainPoll    = 20 * time.Millisecond
	maxDrainPoll = 500 * time.Millisecond
	// drainLast is the maximum time for the process to read the data in its sockets after the end of the drain.
	drainLast = 2 * time.Second
	// drainGrace is the time to answer requests already read.
	drainGrace = 50 * time.Millisecond
	// exitGrace is the time for the process to exit after its signal. Then a warning follows, and later ones at
	// intervals that double up to maxExitWarning.
	exitGrace      = 5 * time.Second
	maxExitWarning = time.Hour
)

// retiring is a running Retirement of one process, independent of later changes of the slot.
type retiring struct {
	Retirement
	root    *kernel.Root
	who     slots.Process
	cookies map[uint64]bool // of its sockets
	until   uint64          // deadline, CLOCK_MONOTONIC, ns
	back    bool            // the process has its slot again
}

// Run waits for the end of the drain and ends the process. Without a draining process it returns at once.
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
	if !v.who.Alive() { // the PID was reused before it was opened
		return nil
	}
	t.Log.Info("previous generation drains", "service", t.Slot.Service, "slot", t.Slot.Slot, "pid", v.who.PID, "until", kernel.WallTime(v.until).Format(time.TimeOnly))
	if err := v.drained(ctx, now, proc); err != nil || !proc.Alive() {
		return err
	}
	if err := v.close(ctx); err != nil {
		return err
	}
	if v.back {
		t.Log.Warn("previous generation has its slot again, it is not ended", "service", t.Slot.Service, "slot", t.Slot.Slot, "pid", v.who.PID)
	}
	if v.back || t.Keep {
		return nil
	}
	sig := t.Signal
	if sig == 0 {
		sig = gracefulSignal(v.who.PID)
	}
	if err := unix.PidfdSendSignal(proc.FD(), sig, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("end process %d: %w", v.who.PID, err)
	}
	t.Log.Info("stop signal sent to the previous generation", "service", t.Slot.Service, "slot", t.Slot.Slot, "pid", v.who.PID, "signal", sig)
	return v.exited(ctx, proc, sig)
}

// exited waits for the exit of the process, and warns while it lives. Without Watch one warning ends it.
func (v *retiring) exited(ctx context.Context, proc *pidfd.Process, sig syscall.Signal) error {
	sent, again := time.Now(), exitGrace
	for wait := drainPoll; proc.Alive(); wait = min(wait+wait/8, maxDrainPoll) {
		if lives := time.Since(sent); lives >= again {
			now, _ := v.read() // for its connections
			v.Log.Warn("previous generation lives on after its stop signal, end it by hand", "service", v.Slot.Service, "slot", v.Slot.Slot, "pid", v.who.PID,
				"signal", sig, "duration", lives.Round(time.Second), "sessions", now.Sessions)
			if again = min(2*again, again+maxExitWarning); !v.Watch {
				return nil
			}
		}
		if err := slots.Sleep(ctx, wait); err != nil {
			return err
		}
	}
	v.Log.Info("previous generation ended", "service", v.Slot.Service, "slot", v.Slot.Slot, "pid", v.who.PID)
	return nil
}

// drained waits until nothing remains, or until the deadline.
func (v *retiring) drained(ctx context.Context, now slots.Remaining, proc *pidfd.Process) (err error) {
	opening := now.Opening // handshakes begun before the change: they end in the old queue
	clean := 0
	for wait := drainPoll; proc.Alive() && !v.back; wait = min(wait+wait/8, maxDrainPoll) {
		for remote := range opening {
			if !now.Opening[remote] {
				delete(opening, remote)
			}
		}
		// Two clean readings are necessary, because a reading is not a snapshot. It may miss a connection while the
		// process accepts it: gone from the queue, and not yet in the process.
		if now.Peers+now.Waiting+now.Sessions+int(now.Unread)+len(opening) > 0 {
			clean = 0
		} else if clean++; clean == 2 {
			return nil
		} else {
			wait = drainPoll
		}
		if kernel.Monotonic() >= v.until {
			v.Log.Warn("drain deadline reached, ending remaining sessions", "service", v.Slot.Service, "slot", v.Slot.Slot, "pid", v.who.PID, "sessions", now.Sessions, "waiting", now.Waiting)
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

// close ends the drain and waits for the data in the sockets.
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

// endDraining sets the deadline to now, unless the process has its slot again.
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

// read reads the remaining work of the process. The first call finds the draining process.
func (v *retiring) read() (l slots.Remaining, err error) {
	s, err := state.ReadService(v.root, record.Instance(v.Slot.Scope, v.Slot.Service))
	if err != nil {
		return l, err
	}
	if s.Record.Service.Generations == nil {
		return l, fmt.Errorf("service %s has no generations: add generations: {} to its steer section and apply", s.Name)
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
		return l, err // a newer generation exists: the program sends nothing to this process
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
