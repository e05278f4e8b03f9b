// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/pidfd"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
)

// process is one process for good: numbers of processes are reused.
type process struct {
	pid   int
	start uint64 // clock ticks since boot
}

func processOf(pid int) (process, error) {
	start, err := pidfd.StartTime(pid)
	return process{pid, start}, err
}

// vetting says what to do about the check of a member that is to be admitted.
type vetting struct {
	proven map[process]bool // found ready already, or serving now
	only   process          // who alone is meant by the member's number; zero: whoever has it
	rate   *Rate            // of resets that follow; nil: the service's
	limit  time.Duration    // of checks made while the lock is held; 0: none is made
}

// underLock is how long checks may hold up whoever waits for the lock: weir
// apply asks once, and leaves the rest to weir serve.
const underLock = 2 * time.Second

// vetted asks the member's own check, unless it is known to be ready.
func (e *engine) vetted(ctx context.Context, p *published, slot int, m service.Member, a *service.Adoption, ns *netns.Handle) error {
	if e.vet == nil {
		e.vet = &vetting{}
	}
	if m.Ready == nil && e.vet.only == (process{}) {
		return nil
	}
	who, err := processOf(a.PIDs()[0])
	if err != nil {
		return fmt.Errorf("%w: %w", service.ErrNotRunning, err)
	}
	if err := e.vet.meant(who); err != nil || m.Ready == nil || e.vet.proven[who] {
		return err
	}
	if e.vet.limit <= 0 {
		return fmt.Errorf("%w: its check was not run yet", service.ErrNotReady)
	}
	began := time.Now()
	defer func() { e.vet.limit -= time.Since(began) }()
	brief := *m.Ready
	brief.Timeout = min(brief.Limit(), e.vet.limit)
	return brief.Check(ctx, ns, p.asked(slot, who))
}

// meant refuses a process that has come by another's number.
func (v *vetting) meant(who process) error {
	if v.only != (process{}) && v.only != who {
		return fmt.Errorf("%w: process %d has exited, and its number is another's", service.ErrNotRunning, who.pid)
	}
	return nil
}

func (p *published) asked(slot int, who process) service.Asked {
	return service.Asked{Service: p.Service.Name, Slot: slot, PID: who.pid, Start: who.start, Netns: p.Netns}
}

// Admit gives a slot to member, or to the configured one if member is nil, as
// [Register] does, but waits for the member's check, if it has one, before it
// takes the lock. It tries once: [Waiting] tells errors that may pass.
func Admit(ctx context.Context, r *kernel.Root, s Slot, member *service.Member) (changed bool, err error) {
	return admitOnly(ctx, r, s, member, process{})
}

// admitOnly is Admit for one process, whoever gets its number later.
func admitOnly(ctx context.Context, r *kernel.Root, s Slot, member *service.Member, only process) (changed bool, err error) {
	defer func() {
		if member == nil || err == nil { // what keeps somebody else out is no reason
			remark(r, s, err)
		}
	}()
	p, err := readService(r, serviceInstance(s.Scope, s.Service))
	if err != nil {
		return false, fmt.Errorf("service %s: %w", s.Service, err)
	}
	m, err := p.member(s, member)
	if err != nil {
		return false, err
	}
	who, err := p.find(ctx, s, m)
	if err != nil {
		return false, err
	}
	vet := vetting{only: only}
	if err := vet.meant(who); err != nil {
		return false, err
	}
	if member != nil {
		if err := p.servesElsewhere(ctx, r, s, who); err != nil {
			return false, err
		}
	}
	if m.Ready != nil {
		if !serves(r, s, who) {
			if err := p.check(ctx, s, m, who); err != nil {
				return false, err
			}
		}
		vet.proven = map[process]bool{who: true}
	}
	l, err := r.Lock(ctx)
	if err != nil {
		return false, err
	}
	defer l.Unlock()
	return register(ctx, l, s, &m, &vet)
}

// AdmitWithin tries Admit until it succeeds, fails for good, or wait is over.
func AdmitWithin(ctx context.Context, r *kernel.Root, s Slot, member *service.Member, wait time.Duration) (changed bool, err error) {
	err = within(ctx, wait, func() (err error) { changed, err = Admit(ctx, r, s, member); return err })
	if Waiting(err) {
		err = fmt.Errorf("slot %d of %s stays empty after %s: %w", s.Slot, s.Service, strings.TrimSuffix(wait.String(), "0s"), err)
	}
	return changed && err == nil, err
}

// within tries something until it succeeds, fails for good, or wait is over.
func within(ctx context.Context, wait time.Duration, try func() error) error {
	for deadline := time.Now().Add(wait); ; {
		err := try()
		if err == nil || !Waiting(err) || time.Now().After(deadline) {
			return err
		}
		pause := 20 * time.Millisecond
		if errors.Is(err, service.ErrNotReady) || errors.Is(err, ErrDraining) {
			pause = service.DefaultReadyInterval
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
	}
}

// member is the one that a slot is to be given to.
func (p *published) member(s Slot, named *service.Member) (service.Member, error) {
	if s.Slot < 0 || s.Slot >= p.Service.Slots {
		return service.Member{}, fmt.Errorf("%w: %s has slots 0 to %d", ErrNoSlot, s.Service, p.Service.Slots-1)
	}
	if named != nil {
		return *named, nil
	}
	if m := p.Service.Member(s.Slot); m != nil {
		return *m, nil
	}
	return service.Member{}, fmt.Errorf("%w: slot %d of %s has no member in the configuration: name one with --pid, --pidfile, --unit or --cgroup", ErrNoSlot, s.Slot, s.Service)
}

// find looks for a member without changing anything: most looks find nothing,
// and need no lock.
func (p *published) find(ctx context.Context, s Slot, m service.Member) (process, error) {
	ns, err := s.openNetns(p)
	if err != nil {
		return process{}, err
	}
	defer ns.Close()
	a, err := m.Adopt(ctx, ns, p.Service.Spec)
	if err != nil {
		return process{}, err
	}
	defer a.Close()
	who, err := processOf(a.PIDs()[0])
	if err != nil {
		return who, fmt.Errorf("%w: %w", service.ErrNotRunning, err)
	}
	return who, nil
}

// check runs the member's check in the service's namespace.
func (p *published) check(ctx context.Context, s Slot, m service.Member, who process) error {
	ns, err := s.openNetns(p)
	if err != nil {
		return err
	}
	defer ns.Close()
	return m.Ready.Check(ctx, ns, p.asked(s.Slot, who))
}

// serves says whether a process holds a slot now.
func serves(r *kernel.Root, s Slot, who process) bool {
	slots, err := OpenSlots(r, s.Scope, s.Service)
	if err != nil {
		return false
	}
	defer slots.Close()
	now, err := processIn(slots.pins, slots.pub.row(s.Slot))
	return err == nil && now == who
}

// ErrOtherSlot says that a process serves another slot of the service.
var ErrOtherSlot = errors.New("wrong process")

// servesElsewhere refuses a process that serves another slot of the service, unless the configuration names it for this one
// too: a wrong number would take a slot from its own member without a word.
func (p *published) servesElsewhere(ctx context.Context, r *kernel.Root, s Slot, who process) error {
	slots, err := OpenSlots(r, s.Scope, s.Service)
	if err != nil {
		return nil // which the admission tells
	}
	defer slots.Close()
	for i := range slots.pub.Service.Slots {
		if now, err := processIn(slots.pins, slots.pub.row(i)); i == s.Slot || err != nil || now != who {
			continue
		}
		if m := p.Service.Member(s.Slot); m != nil {
			if named, err := p.find(ctx, s, *m); err == nil && named == who {
				return nil
			}
		}
		return fmt.Errorf("%w: process %d serves slot %d of %s: weir steer unregister %s --slot %d comes first, or name it for both slots in the configuration", ErrOtherSlot, who.pid, i, s.Service, s.Service, i)
	}
	return nil
}

// processIn is the process that a row is admitted with, or none.
func processIn(pins *kernel.Opened, row uint32) (process, error) {
	var s bpf.SteerSlot
	if err := pins.Maps["slots"].Lookup(row, &s); err != nil || slotState(s.State) != stateAdmitted {
		return process{}, err
	}
	return process{int(s.Tgid), s.Start}, nil
}

// heir is the member that a slot of a changed service begins with in its new
// row: the configured one, or, where the configuration names no process (it
// registered itself, or somebody did by its number), whoever serves the slot
// now. Who serves now is ready. It is nil if there is none.
func (e *engine) heir(p, old *published, slot int) *service.Member {
	m := p.Service.Member(slot)
	if slot >= old.Service.Slots {
		return m
	}
	now, err := processIn(e.pins, old.row(slot))
	if err != nil || now.pid == 0 {
		return m
	}
	e.vet = &vetting{proven: map[process]bool{now: true}}
	if m != nil && m.User == "" {
		return m
	}
	heir := service.Member{Slot: slot, PID: now.pid}
	if m != nil {
		heir.Bound, heir.Ready, heir.Keep = m.Bound, m.Ready, m.Keep
	}
	if who, err := processOf(now.pid); err != nil || who != now {
		return nil
	}
	return &heir
}
