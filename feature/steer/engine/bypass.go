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

// errBypassed means that the service is bypassed. Its engine then admits no member.
var errBypassed = errors.New("service is bypassed")

// Bypass excludes a service's traffic from steering, or undoes this. The service and its members remain. apply keeps
// the bypass. Bypass reports whether anything changed.
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
		// Meanwhile the kernel chose the member of each new session.
		if err := e.Owe(p, nil); err != nil {
			return false, err
		}
	}
	if err := e.replace(p, old, nil); err != nil {
		return true, err
	}
	return true, ReconcileCopies(l, scope, true)
}

// rejoin attaches the program to the members' groups again after a bypass. weir serve or weir apply handles members
// with changed sockets.
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
