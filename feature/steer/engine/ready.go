// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/units"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
)

// Vetting controls the check of a member before its admission.
type Vetting struct {
	Proven map[slots.Process]bool // known to be ready, or serving now
	only   slots.Process          // the only acceptable process; zero: any
	Rate   *spec.Rate             // of the resets that follow; nil: the service's rate
	Limit  time.Duration          // of checks under the lock; 0: run none
}

// UnderLock limits checks under the lock, because other commands wait for it. weir apply checks once and leaves the
// rest to weir serve.
const UnderLock = 2 * time.Second

// vetted runs the member's check, unless the member is known to be ready.
func (e *Engine) vetted(ctx context.Context, p *record.Service, slot int, m service.Member, a *service.Adoption, ns *netns.Handle) error {
	if e.vet == nil {
		e.vet = &Vetting{}
	}
	if m.Ready == nil && e.vet.only == (slots.Process{}) {
		return nil
	}
	who, err := slots.FindProcess(a.PIDs()[0])
	if err != nil {
		return fmt.Errorf("%w: %w", service.ErrNotRunning, err)
	}
	if err := e.vet.meant(who); err != nil || m.Ready == nil || e.vet.Proven[who] {
		return err
	}
	if e.vet.Limit <= 0 {
		return fmt.Errorf("%w: its check has not run yet", service.ErrNotReady)
	}
	began := time.Now()
	defer func() { e.vet.Limit -= time.Since(began) }()
	brief := *m.Ready
	brief.Timeout = min(brief.Limit(), e.vet.Limit)
	return brief.Check(ctx, ns, checkRequest(p, slot, who))
}

// meant rejects another process under a reused PID.
func (v *Vetting) meant(who slots.Process) error {
	if v.only != (slots.Process{}) && v.only != who {
		return fmt.Errorf("%w: process %d has exited and its PID is reused", service.ErrNotRunning, who.PID)
	}
	return nil
}

func checkRequest(p *record.Service, slot int, who slots.Process) service.Asked {
	return service.Asked{Service: p.Service.Name, Slot: slot, PID: who.PID, Start: who.Start, Netns: p.Netns}
}

// Admit gives a slot to member, or to the configured member if member is nil, like [AdmitLocked]. It runs the member's
// check before it takes the lock. It tries once: [Waiting] recognizes temporary errors.
func Admit(ctx context.Context, r *kernel.Root, s slots.Slot, member *service.Member) (changed bool, err error) {
	return AdmitOnly(ctx, r, s, member, slots.Process{}, nil)
}

// AdmitOnly is Admit restricted to process only. It rejects another process with the same PID. It calls allowed with the
// lock, because a command may change the slot during the check: an error ends the admission.
func AdmitOnly(ctx context.Context, r *kernel.Root, s slots.Slot, member *service.Member, only slots.Process, allowed func() error) (changed bool, err error) {
	defer func() {
		if member == nil && err != nil { // the failure of another process does not explain an empty slot
			Remark(r, s, err)
		}
	}()
	p, err := record.Read(r, record.Instance(s.Scope, s.Service))
	if err != nil {
		return false, fmt.Errorf("service %s: %w", s.Service, err)
	}
	m, err := MemberFor(p, s, member)
	if err != nil {
		return false, err
	}
	who, err := FindMember(p, ctx, s, m)
	if err != nil {
		return false, err
	}
	vet := Vetting{only: only}
	if err := vet.meant(who); err != nil {
		return false, err
	}
	if member != nil {
		if err := servesElsewhere(p, ctx, r, s, who); err != nil {
			return false, err
		}
	}
	if m.Ready != nil {
		if !serves(r, s, who) {
			if err := CheckMember(p, ctx, s, m, who); err != nil {
				return false, err
			}
		}
		vet.Proven = map[slots.Process]bool{who: true}
	}
	l, err := r.Lock(ctx)
	if err != nil {
		return false, err
	}
	defer l.Unlock()
	if allowed != nil {
		if err := allowed(); err != nil {
			return false, err
		}
	}
	if changed, err = AdmitLocked(ctx, l, s, &m, &vet); err == nil {
		Remark(r, s, nil) // within the lock: weir serve would give a slot with the remark to the configured member
	}
	return changed, err
}

// AdmitWithin repeats Admit until it succeeds, fails permanently, or wait has passed. A withdrawal meanwhile ends it,
// because the later command counts.
func AdmitWithin(ctx context.Context, r *kernel.Root, s slots.Slot, member *service.Member, wait time.Duration) (changed bool, err error) {
	was, err := IsWithdrawn(r, s)
	if err != nil {
		return false, err
	}
	stays := func() error {
		if now, err := IsWithdrawn(r, s); err != nil || was || !now {
			return err
		}
		return fmt.Errorf("slot %d of %s was withdrawn meanwhile", s.Slot, s.Service)
	}
	err = Within(ctx, wait, func() (err error) {
		changed, err = AdmitOnly(ctx, r, s, member, slots.Process{}, stays)
		return err
	})
	if Waiting(err) {
		err = fmt.Errorf("slot %d of %s stays empty after %s: %w", s.Slot, s.Service, strings.TrimSuffix(wait.String(), "0s"), err)
	}
	return changed && err == nil, err
}

// Within repeats try until it succeeds, fails permanently, or wait has passed.
func Within(ctx context.Context, wait time.Duration, try func() error) error {
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

// MemberFor returns named, or the configured member of the slot if named is nil.
func MemberFor(p *record.Service, s slots.Slot, named *service.Member) (service.Member, error) {
	if s.Slot < 0 || s.Slot >= p.Service.Slots {
		return service.Member{}, fmt.Errorf("%w: %s has slots 0 to %d", record.ErrNoSlot, s.Service, p.Service.Slots-1)
	}
	if named != nil {
		return *named, nil
	}
	if m := p.Service.Member(s.Slot); m != nil {
		return *m, nil
	}
	return service.Member{}, fmt.Errorf("%w: slot %d of %s has no member in the configuration: name one with --pid, --pidfile, --unit or --cgroup", record.ErrNoSlot, s.Slot, s.Service)
}

// FindMember finds a member's process and changes nothing. Most searches find nothing, so they take no lock.
func FindMember(p *record.Service, ctx context.Context, s slots.Slot, m service.Member) (slots.Process, error) {
	ns, err := s.OpenNetns(p)
	if err != nil {
		return slots.Process{}, err
	}
	defer ns.Close()
	a, err := m.Adopt(ctx, ns, p.Service.Spec)
	if err != nil {
		return slots.Process{}, err
	}
	defer a.Close()
	who, err := slots.FindProcess(a.PIDs()[0])
	if err != nil {
		return who, fmt.Errorf("%w: %w", service.ErrNotRunning, err)
	}
	return who, nil
}

// CheckMember runs the member's check in the service's namespace.
func CheckMember(p *record.Service, ctx context.Context, s slots.Slot, m service.Member, who slots.Process) error {
	ns, err := s.OpenNetns(p)
	if err != nil {
		return err
	}
	defer ns.Close()
	return m.Ready.Check(ctx, ns, checkRequest(p, s.Slot, who))
}

// serves reports whether a process is admitted in a slot.
func serves(r *kernel.Root, s slots.Slot, who slots.Process) bool {
	all, err := slots.Open(r, s.Scope, s.Service)
	if err != nil {
		return false
	}
	defer all.Close()
	now, err := slots.ProcessIn(all.Pins, all.Record.Row(s.Slot))
	return err == nil && now == who
}

// ErrOtherSlot reports a process already in another slot of the service.
var ErrOtherSlot = errors.New("wrong process")

// servesElsewhere rejects a process in another slot of the service, unless the configuration names it for this slot
// too. Otherwise a wrong slot number would silently replace the slot's own member.
func servesElsewhere(p *record.Service, ctx context.Context, r *kernel.Root, s slots.Slot, who slots.Process) error {
	all, err := slots.Open(r, s.Scope, s.Service)
	if err != nil {
		return nil // the admission reports the error
	}
	defer all.Close()
	for i := range all.Record.Service.Slots {
		if now, err := slots.ProcessIn(all.Pins, all.Record.Row(i)); i == s.Slot || err != nil || now != who {
			continue
		}
		if m := p.Service.Member(s.Slot); m != nil {
			if named, err := FindMember(p, ctx, s, *m); err == nil && named == who {
				return nil
			}
		}
		return fmt.Errorf("%w: process %d serves slot %d of %s: run weir steer withdraw %s --slot %d first, or name it for both slots in the configuration", ErrOtherSlot, who.PID, i, s.Service, s.Service, i)
	}
	return nil
}

// successor returns the first member of a changed service's slot in its new row. This is the configured member. If the
// configuration names no process (registration by itself or by PID), it is the current process, known to be ready. It
// is nil if there is neither.
func (e *Engine) successor(p, old *record.Service, slot int) *service.Member {
	m := p.Service.Member(slot)
	if slot >= old.Service.Slots {
		return m
	}
	now, err := slots.ProcessIn(e.Pins, old.Row(slot))
	if err != nil || now.PID == 0 {
		return m
	}
	e.vet = &Vetting{Proven: map[slots.Process]bool{now: true}}
	if m != nil && m.User == "" {
		return m
	}
	heir := service.Member{Slot: slot, PID: now.PID}
	if m != nil {
		heir.Bound, heir.Ready, heir.Keep = m.Bound, m.Ready, m.Keep
	}
	if who, err := slots.FindProcess(now.PID); err != nil || who != now {
		return nil
	}
	return &heir
}

// Remark stores the reason of an empty slot for readers. A nil err clears it.
func Remark(r *kernel.Root, s slots.Slot, err error) { remark(r, s, err, "") }

// RemarkKept is Remark for a slot still occupied by a process from before its member was configured.
func RemarkKept(r *kernel.Root, s slots.Slot, err error) { remark(r, s, err, KeptMark) }

func remark(r *kernel.Root, s slots.Slot, err error, mark string) {
	text := ""
	if err != nil {
		text = strings.ToValidUTF8(err.Error(), "?")
		if !foundBeforehand(err) {
			text = LateMark + text
		}
		text = mark + text
	}
	r.Remark(record.Instance(s.Scope, s.Service), strconv.Itoa(s.Slot), text)
}

// KeptMark begins a remark of [RemarkKept].
const KeptMark = "="

// LateMark begins a remark that a search for the member cannot reproduce.
const LateMark = "+"

// foundBeforehand reports whether a search for the member returns this error.
func foundBeforehand(err error) bool {
	for _, e := range []error{service.ErrNotRunning, service.ErrNoSocket, service.ErrNarrow, service.ErrAmbiguous, service.ErrMPTCP, service.ErrElsewhere,
		units.ErrNoSystemd, units.ErrNoUnit, os.ErrPermission} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}
