// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"errors"

	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
)

// ErrBypassed says that a service is bypassed, so that its engine admits nobody.
var ErrBypassed = errors.New("service is bypassed")

// Bypass leaves a service's traffic to the kernel alone, or takes that back. The
// service stays, with its members, until it is steered again; apply keeps it so.
// It reports whether anything changed.
func Bypass(l *kernel.WriteLock, scope, service string, on bool) (did bool, err error) {
	e, old, err := openSlot(l, Slot{Scope: scope, Service: service})
	if err != nil {
		return false, err
	}
	defer e.Close()
	if old.Bypassed == on {
		return false, nil
	}
	p, err := changed(l.Root, scope, old, func(p *published) error { p.Bypassed = on; return nil })
	if err != nil {
		return false, err
	}
	if !on {
		// Whoever connected meanwhile is where the kernel put it.
		if err := e.owe(p, nil); err != nil {
			return false, err
		}
	}
	if err := e.replace(p, old, nil); err != nil {
		return true, err
	}
	return true, syncCopies(l, scope, true)
}

// rejoin attaches the program to the members' groups again, which are left while
// a service is bypassed. A member that has changed since is left to weir serve,
// or to weir apply.
func (e *engine) rejoin(p *published) error {
	ns, err := e.openNetns()
	if errors.Is(err, ErrNetnsGone) {
		return nil
	} else if err != nil {
		return err
	}
	defer ns.Close()
	for slot, row := range p.Rows {
		var s bpf.SteerSlot
		if err := e.pins.Maps["slots"].Lookup(row, &s); err != nil {
			return err
		}
		if slotState(s.State) != stateAdmitted {
			continue
		}
		m := service.Member{PID: int(s.Tgid)}
		if c := p.Service.Member(slot); c != nil {
			m.Bound = c.Bound
		}
		a, err := m.Adopt(context.Background(), ns, p.Service.Spec)
		if notYet(err) {
			continue
		} else if err != nil {
			return err
		}
		_, err = e.join(p, row, a, ns)
		a.Close()
		if err != nil && !notYet(err) {
			return err
		}
	}
	return nil
}
