// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/internal/users"
	"github.com/weir-project/weir/service"
)

// keepSlot gives the slot to a daemon once its sockets exist, and again after it has reopened them, until ctx is done.
func (s *supervisor) keepSlot(ctx context.Context, pid int) {
	said := ""
	had := false
	var retiring sync.WaitGroup
	defer retiring.Wait()
	for ctx.Err() == nil {
		wait := time.Second
		if s.wanted(pid, had) {
			if !had && s.generations {
				if err := s.outdated(); err != nil {
					s.stale <- err
					return
				}
			}
			changed, err := s.admit(ctx, pid)
			if ready(err) {
				s.announce(ctx)
			}
			switch {
			case ctx.Err() != nil:
				return
			case err == nil:
				if s.Replace && !had {
					retiring.Go(func() { s.retire(ctx) })
				}
				had, said = true, ""
				if changed {
					s.Log.Info("slot admitted", "service", s.Slot.Service, "slot", s.Slot.Slot, "pid", pid)
				}
			default:
				if errors.Is(err, engine.ErrDraining) {
					wait = 200 * time.Millisecond
				} else if engine.Waiting(err) && !errors.Is(err, service.ErrNotReady) {
					wait = 20 * time.Millisecond
				} else if s.member.Ready != nil {
					wait = s.member.Ready.Every()
				}
				if err.Error() != said {
					said = err.Error()
					s.Log.Warn("daemon not admitted yet", "service", s.Slot.Service, "slot", s.Slot.Slot, "err", said)
				}
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
	}
}

// retire ends the previous generation. The daemon has the slot already.
func (s *supervisor) retire(ctx context.Context) {
	err := Retirement{Slot: s.Slot, Signal: s.Stop, Watch: true, Log: s.Log}.Run(ctx, s.root)
	if err != nil && ctx.Err() == nil {
		s.Log.Warn("previous generation not ended", "service", s.Slot.Service, "slot", s.Slot.Slot, "err", err)
	}
}

// wanted reports whether the slot should go to the daemon: at its start, and later if the slot is empty, unless an
// operator has withdrawn it.
func (s *supervisor) wanted(pid int, had bool) bool {
	slots, err := slots.Open(s.root, s.Slot.Scope, s.Slot.Service)
	if err != nil {
		return false // the service is gone for now
	}
	defer slots.Close()
	now, err := slots.State(s.Slot.Slot)
	switch {
	case err != nil || now.Withdrawn && had:
		return false
	case now.Admitted() && had:
		return now.Orphaned(&service.Member{Keep: true})
	}
	return true
}

// admit gives the slot to the daemon, or to its child with the sockets, because daemons may run in wrappers.
func (s *supervisor) admit(ctx context.Context, pid int) (changed bool, err error) {
	m := s.member
	// List the children before asking the parent. A listed child has then inherited its sockets from a parent that
	// already had them, and the parent is found first. The member must be the process that opened the sockets, not a
	// worker: its master would restart it.
	children := slots.Descendants(pid)
	m.PID = pid
	if changed, err = engine.Admit(ctx, s.root, s.Slot, &m); !errors.Is(err, service.ErrNoSocket) {
		return changed, err
	}
	for _, child := range children {
		m.PID = child
		if changed, cerr := engine.Admit(ctx, s.root, s.Slot, &m); !engine.Waiting(cerr) || errors.Is(cerr, service.ErrNotReady) {
			return changed, cerr
		}
	}
	return false, err
}

// become resolves the daemon's user, given by name or number.
func (s *supervisor) become(name string) (uid int, err error) {
	id, err := users.Find(name)
	if err != nil {
		return 0, err
	}
	s.as, s.env = &id, append(id.Environ(), s.Env...)
	return int(id.Credential.Uid), nil
}
