// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/bounded"
	"github.com/weir-project/weir/internal/units"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
)

// AdmitLocked gives a slot to member, or to the configured member if member is nil. It reports whether the slot
// changed: a member already admitted with the same sockets is left alone. [Waiting] recognizes temporary errors. The
// member's check runs once and briefly, because the caller holds the lock. [Admit] waits for it without the lock. vet
// may be nil.
//
// The member may hold TCP sessions of devices in other slots: see package reset.
func AdmitLocked(ctx context.Context, l *kernel.WriteLock, s slots.Slot, member *service.Member, vet *Vetting) (changed bool, err error) {
	e, p, err := OpenSlot(l, s)
	if err != nil {
		return false, err
	}
	defer e.Close()
	if vet == nil {
		vet = &Vetting{Limit: UnderLock}
	}
	return e.Admit(ctx, p, s, member, vet)
}

// Admit gives a slot to member, or to the configured member if member is nil. It reports whether the slot changed.
func (e *Engine) Admit(ctx context.Context, p *record.Service, s slots.Slot, member *service.Member, vet *Vetting) (changed bool, err error) {
	e.vet, e.Rate = vet, vet.Rate
	m, err := MemberFor(p, s, member)
	if err != nil {
		return false, err
	}
	ns, err := s.OpenNetns(p)
	if err != nil {
		return false, err
	}
	defer ns.Close()
	return e.admit(ctx, p, s.Slot, m, ns)
}

// Withdraw withdraws a slot: its traffic is handled by on_empty until [AdmitLocked]. A running weir serve does not
// admit it again.
func Withdraw(l *kernel.WriteLock, s slots.Slot) error {
	e, p, err := OpenSlot(l, s)
	if err != nil {
		return err
	}
	defer e.Close()
	if err := e.SetState(p.Row(s.Slot), slots.Withdrawn); err != nil {
		return err
	}
	if err := e.forgetGeneration(p, s.Slot); err != nil {
		return err
	}
	return e.forgetExits(p.Row(s.Slot))
}

// IsWithdrawn reports whether an operator keeps a slot empty.
func IsWithdrawn(r *kernel.Root, s slots.Slot) (bool, error) {
	all, err := slots.Open(r, s.Scope, s.Service)
	if err != nil {
		return false, err
	}
	defer all.Close()
	if s.Slot < 0 || s.Slot >= all.Slots() {
		return false, fmt.Errorf("%w: %s has slots 0 to %d", record.ErrNoSlot, s.Service, all.Slots()-1)
	}
	now, err := all.State(s.Slot)
	return now.Withdrawn, err
}

// Awaited reports whether a process from before the member's configuration keeps the slot. The member gets the slot
// when it appears. A process admitted by an operator keeps its slot, because its admission cleared the remark. With
// generations, weir serve searches for the next one.
func Awaited(r *kernel.Root, p *record.Service, s slots.Slot) bool {
	return p.Service.Generations == nil &&
		strings.HasPrefix(r.Remarks(record.Instance(s.Scope, s.Service), strconv.Itoa(s.Slot)), KeptMark)
}

// StillDue reports whether a slot needs its member as it did when it was read as was. weir serve searches for members
// without the lock: a command may withdraw the slot meanwhile, or give it to another process.
func StillDue(l *kernel.WriteLock, p *record.Service, s slots.Slot, was slots.State) bool {
	served := was.Admitted() && !was.Orphaned(p.Service.Member(s.Slot))
	if served && p.Service.Generations == nil && !Awaited(l.Root, p, s) {
		return false
	}
	r, err := slots.Open(l.Root, s.Scope, s.Service)
	if err != nil {
		return false
	}
	defer r.Close()
	now, err := r.State(s.Slot)
	return err == nil && now.Same(was)
}

// OpenSlot opens the engine and the record of a slot's service. The caller closes the engine.
func OpenSlot(l *kernel.WriteLock, s slots.Slot) (*Engine, *record.Service, error) {
	p, err := record.Read(l.Root, record.Instance(s.Scope, s.Service))
	if err != nil {
		return nil, nil, err
	}
	e, err := OpenEngine(l, s.Scope, p.Engine)
	if err != nil {
		return nil, nil, err
	}
	if s.Slot < 0 || s.Slot >= p.Service.Slots {
		e.Close()
		return nil, nil, fmt.Errorf("%w: %s has slots 0 to %d", record.ErrNoSlot, s.Service, p.Service.Slots-1)
	}
	return e, p, nil
}

// Waiting reports whether a member may be admitted later: it does not run, has not opened all its sockets, fails its
// check, or the kernel does not answer now.
func Waiting(err error) bool {
	return errors.Is(err, bounded.ErrStuck) || errors.Is(err, service.ErrNotRunning) || errors.Is(err, service.ErrNoSocket) || errors.Is(err, ErrDraining) || errors.Is(err, service.ErrNotReady)
}

// NotYet is Waiting plus all other errors of a member that must not block an apply. Status shows the reason.
func NotYet(err error) bool {
	return Waiting(err) || errors.Is(err, service.ErrNarrow) || errors.Is(err, service.ErrAmbiguous) || errors.Is(err, service.ErrMPTCP) ||
		errors.Is(err, service.ErrElsewhere) || errors.Is(err, errBypassed) || errors.Is(err, errForeign) || errors.Is(err, errNotShared) || errors.Is(err, ErrSocketInUse) || errors.Is(err, units.ErrNoSystemd) || errors.Is(err, units.ErrNoUnit) ||
		errors.Is(err, os.ErrPermission)
}

// RemoveStep returns the plan step that removes a service.
func RemoveStep(scope, name string) feature.Step {
	return feature.Step{Verb: "remove", Object: "service " + name,
		Do: func(_ context.Context, l *kernel.WriteLock) (string, error) { return "", RemoveService(l, scope, name) }}
}

// RemoveService removes a service and returns its traffic to the kernel. With the last service of a namespace it also
// removes the engine.
func RemoveService(l *kernel.WriteLock, scope, name string) error {
	p, err := record.Read(l.Root, record.Instance(scope, name))
	if errors.Is(err, kernel.ErrNotExist) {
		return nil
	} else if err == nil {
		err = removeService(l, scope, p)
	} else if errors.Is(err, kernel.ErrDamaged) {
		err = RemoveDamaged(l, record.Instance(scope, name))
	}
	if err != nil {
		return err
	}
	if p == nil {
		return errors.Join(ReconcileBind(l, false), ReconcileCopies(l, scope, false))
	}
	return errors.Join(ReconcileBind(l, false), ReconcileCopies(l, scope, false, p))
}

func removeService(l *kernel.WriteLock, scope string, p *record.Service) error {
	name := p.Service.Name
	e, err := OpenEngine(l, scope, p.Engine)
	if errors.Is(err, kernel.ErrNotExist) {
		return l.Remove(record.Instance(scope, name))
	} else if err != nil {
		return err
	}
	defer e.Close()
	if err := e.Mark(true); err != nil {
		return err
	}
	if err := l.Remove(record.Instance(scope, name)); err != nil {
		return err
	}
	kernel.Step("steer:removed")
	e.Drop(name)
	if err := e.Reconcile(); err != nil || !e.Idle() {
		return err
	}
	if err := RemoveTemplates(l, scope); err != nil {
		return err
	}
	return e.RemoveIdle()
}

// RemoveDamaged removes a service without usable pins or record.
func RemoveDamaged(l *kernel.WriteLock, i kernel.Instance) error {
	var engines []*Engine
	for _, kind := range record.Engines {
		e, err := OpenEngine(l, i.Scope, kind)
		if errors.Is(err, kernel.ErrNotExist) {
			continue
		} else if err != nil {
			return err
		}
		defer e.Close()
		if err := e.Mark(true); err != nil {
			return err
		}
		engines = append(engines, e)
	}
	err := l.Remove(i)
	for _, e := range engines {
		err = cmp.Or(err, e.readAgain(i.Name), e.Reconcile())
	}
	return err
}

// RemoveIdle removes an engine without services and bindings.
func (e *Engine) RemoveIdle() error {
	if used, err := e.Dispatches(); err != nil || used || !e.Idle() {
		return err
	}
	if err := e.Lock.Remove(record.EngineInstance(e.Scope, e.Kind)); err != nil {
		return err
	}
	if e.Kind == spec.EngineReuseport {
		e.PokeSocketHolder() // the holder then exits
	}
	return nil
}
