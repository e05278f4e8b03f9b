// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/bounded"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/units"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
)

// ErrNoSlot says that a service has no such slot, or the slot no member.
var ErrNoSlot = errors.New("no such slot")

// Slot names a slot of a published service. Scope is the directory of its
// network namespace (ServiceState.Scope).
type Slot struct {
	Scope   string
	Service string
	Slot    int
}

// inodeOf is the inode number of the network namespace of a pin directory.
func inodeOf(scope string) (uint64, error) { return strconv.ParseUint(scope, 10, 64) }

// Scope is the pin directory of the service's namespace: its inode number.
func (s *ServiceState) Scope() string { return s.scope }

// Register gives a slot to member, or to the member that the configuration
// names if member is nil. It reports whether anything changed: a member that
// holds the slot with the same sockets is left alone. [Waiting] tells errors
// that may pass from others. A member's check is run once, and briefly, since
// the lock is held: [Admit] waits for it without.
//
// The member may hold TCP sessions of devices that belong elsewhere: [ResetDue].
func Register(ctx context.Context, l *kernel.WriteLock, s Slot, member *service.Member) (changed bool, err error) {
	return register(ctx, l, s, member, &vetting{limit: underLock})
}

func register(ctx context.Context, l *kernel.WriteLock, s Slot, member *service.Member, vet *vetting) (changed bool, err error) {
	e, p, err := openSlot(l, s)
	if err != nil {
		return false, err
	}
	defer e.Close()
	return e.register(ctx, p, s, member, vet)
}

// register is Register in the batch: its engine stays open.
func (b *batch) register(ctx context.Context, l *kernel.WriteLock, s Slot, member *service.Member, vet *vetting) (changed bool, err error) {
	if e := b.of(s.Scope, s.Service); e != nil {
		return e.register(ctx, e.services[s.Service], s, member, vet)
	}
	return register(ctx, l, s, member, vet)
}

func (e *engine) register(ctx context.Context, p *published, s Slot, member *service.Member, vet *vetting) (changed bool, err error) {
	e.vet, e.rate = vet, vet.rate
	m, err := p.member(s, member)
	if err != nil {
		return false, err
	}
	ns, err := s.openNetns(p)
	if err != nil {
		return false, err
	}
	defer ns.Close()
	return e.admit(ctx, p, s.Slot, m, ns)
}

func (s Slot) openNetns(p *published) (*netns.Handle, error) {
	inode, err := inodeOf(s.Scope)
	if err != nil {
		return nil, err
	}
	return openNetns(p.Netns, netns.ID{Inode: inode, Cookie: p.cookie})
}

// Unregister withdraws a slot: its traffic meets on_empty until Register. A
// running weir serve leaves it withdrawn.
func Unregister(l *kernel.WriteLock, s Slot) error {
	e, p, err := openSlot(l, s)
	if err != nil {
		return err
	}
	defer e.Close()
	if err := e.setState(p.row(s.Slot), stateWithdrawn); err != nil {
		return err
	}
	if err := e.forgetGeneration(p, s.Slot); err != nil {
		return err
	}
	return e.forgetExits(p.row(s.Slot))
}

func openSlot(l *kernel.WriteLock, s Slot) (*engine, *published, error) {
	p, err := readService(l.Root, serviceInstance(s.Scope, s.Service))
	if err != nil {
		return nil, nil, err
	}
	e, err := openEngine(l, s.Scope, p.Engine)
	if err != nil {
		return nil, nil, err
	}
	if s.Slot < 0 || s.Slot >= p.Service.Slots {
		e.Close()
		return nil, nil, fmt.Errorf("%w: %s has slots 0 to %d", ErrNoSlot, s.Service, p.Service.Slots-1)
	}
	return e, p, nil
}

// Waiting says that a member could not be admitted yet, and may be later: it
// does not run, has not opened all its sockets, its check fails, or the kernel
// cannot be asked about it now.
func Waiting(err error) bool {
	return errors.Is(err, bounded.ErrStuck) || errors.Is(err, service.ErrNotRunning) || errors.Is(err, service.ErrNoSocket) || errors.Is(err, ErrDraining) || errors.Is(err, service.ErrNotReady)
}

// notYet is Waiting, and whatever else about a member must not keep a
// configuration from being applied: status shows the reason.
func notYet(err error) bool {
	return Waiting(err) || errors.Is(err, service.ErrNarrow) || errors.Is(err, service.ErrAmbiguous) || errors.Is(err, service.ErrMPTCP) ||
		errors.Is(err, service.ErrElsewhere) || errors.Is(err, ErrBypassed) || errors.Is(err, ErrForeign) || errors.Is(err, ErrNotShared) || errors.Is(err, ErrSlotTaken) || errors.Is(err, units.ErrNoSystemd) || errors.Is(err, units.ErrNoUnit) ||
		errors.Is(err, os.ErrPermission)
}

func removeStep(scope, name string) feature.Step {
	return feature.Step{Verb: "remove", Object: "service " + name,
		Do: func(_ context.Context, l *kernel.WriteLock) (string, error) { return "", RemoveService(l, scope, name) }}
}

// RemoveService takes a service away: its traffic is the kernel's own again.
// With the last service of a namespace its program goes too.
func RemoveService(l *kernel.WriteLock, scope, name string) error {
	if err := removeService(l, scope, name); err != nil {
		return err
	}
	return errors.Join(syncBind(l, false), syncCopies(l, scope, false))
}

func removeService(l *kernel.WriteLock, scope, name string) error {
	p, err := readService(l.Root, serviceInstance(scope, name))
	if errors.Is(err, kernel.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	e, err := openEngine(l, scope, p.Engine)
	if errors.Is(err, kernel.ErrNotExist) {
		return l.Remove(serviceInstance(scope, name))
	} else if err != nil {
		return err
	}
	defer e.Close()
	if err := e.mark(true); err != nil {
		return err
	}
	if err := l.Remove(serviceInstance(scope, name)); err != nil {
		return err
	}
	kernel.Step("steer:removed")
	delete(e.services, name)
	if err := e.sync(); err != nil || len(e.services) > 0 {
		return err
	}
	if err := removeTemplates(l, scope); err != nil {
		return err
	}
	return e.removeIdle()
}

// removeIdle takes an engine away that has nothing left to steer.
func (e *engine) removeIdle() error {
	if used, err := e.dispatches(); err != nil || used || len(e.services) > 0 {
		return err
	}
	if err := e.lock.Remove(engineInstance(e.scope, e.kind)); err != nil {
		return err
	}
	if e.kind == EngineReuseport {
		e.pokeHolder() // to see that it is not wanted any more
	}
	return nil
}

// Remove implements feature.Feature.
func (Feature) Remove(ctx context.Context, l *kernel.WriteLock) error {
	all, err := l.Instances(Name)
	if err != nil {
		return err
	}
	// Groups keep their program until it is taken from them, and devices their filter.
	for _, i := range all {
		if i == copyInstance(i.Scope) {
			o, err := l.Open(i)
			if err != nil {
				return err
			}
			defer o.Close()
			if err := removeCopies(l, i.Scope, o); err != nil {
				return err
			}
		}
		if kind, ok := kindOf(i); ok && kind == EngineReuseport {
			e, err := releaseGroups(l, i.Scope)
			if err != nil {
				return err
			}
			defer e.Close()
			defer e.pokeHolder() // once its pins are gone, to see that it is not wanted any more
		}
	}
	// The programs first: what they would steer by goes after them.
	for _, engines := range []bool{true, false} {
		for _, i := range all {
			if err := ctx.Err(); err != nil {
				return err
			}
			if _, ok := kindOf(i); ok == engines {
				if err := l.Remove(i); err != nil {
					return err
				}
			}
		}
	}
	return nil
}
