// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"

	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
)

// errBypassed says that a service is bypassed, so that its engine admits nobody.
var errBypassed = errors.New("service is bypassed")

// Bypass leaves a service's traffic to the kernel alone, or takes that back. The
// service stays, with its members, until it is steered again; apply keeps it so.
// It reports whether anything changed.
func Bypass(l *kernel.WriteLock, scope, service string, on bool) (did bool, err error) {
	e, old, err := OpenSlot(l, slots.Slot{Scope: scope, Service: service})
	if err != nil {
		return false, err
	}
	defer e.Close()
	if old.Bypassed == on {
		return false, nil
	}
	p, err := record.Changed(l.Root, scope, old, func(p *record.Service) error { p.Bypassed = on; return nil })
	if err != nil {
		return false, err
	}
	if !on {
		// Whoever connected meanwhile is where the kernel put it.
		if err := e.Owe(p, nil); err != nil {
			return false, err
		}
	}
	if err := e.replace(p, old, nil); err != nil {
		return true, err
	}
	return true, ReconcileCopies(l, scope, true)
}

// rejoin attaches the program to the members' groups again, which are left while
// a service is bypassed. A member that has changed since is left to weir serve,
// or to weir apply.
func (e *Engine) rejoin(p *record.Service) error {
	ns, err := e.openNetns()
	if errors.Is(err, slots.ErrNetnsGone) {
		return nil
	} else if err != nil {
		return err
	}
	defer ns.Close()
	for slot, row := range p.Rows {
		var s bpf.SteerSlot
		if err := e.Pins.Maps["slots"].Lookup(row, &s); err != nil {
			return err
		}
		if slots.RowState(s.State) != slots.Admitted {
			continue
		}
		m := service.Member{PID: int(s.Tgid)}
		if c := p.Service.Member(slot); c != nil {
			m.Bound = c.Bound
		}
		a, err := m.Adopt(context.Background(), ns, p.Service.Spec)
		if NotYet(err) {
			continue
		} else if err != nil {
			return err
		}
		_, err = e.join(p, row, a, ns)
		a.Close()
		if err != nil && !NotYet(err) {
			return err
		}
	}
	return nil
}
