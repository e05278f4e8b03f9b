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

// keepSlot gives the slot to a daemon once its sockets are there, and again
// when it has opened others, until ctx is done.
func (s *supervisor) keepSlot(ctx context.Context, pid int) {
	said := ""
	had := false
	var retiring sync.WaitGroup
	defer retiring.Wait()
	for ctx.Err() == nil {
		wait := time.Second
		if s.wanted(pid, had) {
			changed, err := s.admit(ctx, pid)
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
					s.Log.Warn("slot waits for the daemon", "service", s.Slot.Service, "slot", s.Slot.Slot, "reason", said)
				}
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
	}
}

// retire ends the generation before the daemon, which has the slot now.
func (s *supervisor) retire(ctx context.Context) {
	err := Retirement{Slot: s.Slot, Signal: s.Stop, Log: s.Log}.Run(ctx, s.root)
	if err != nil && ctx.Err() == nil {
		s.Log.Warn("the generation before was not ended", "service", s.Slot.Service, "slot", s.Slot.Slot, "err", err)
	}
}

// wanted says whether the slot is to be given to the daemon: at its start; later
// if it is empty, but for an operator who wants it so.
func (s *supervisor) wanted(pid int, had bool) bool {
	slots, err := slots.Open(s.root, s.Slot.Scope, s.Slot.Service)
	if err != nil {
		return false // the service is gone, for now
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

// admit gives the slot to the daemon, or to the one of its children that has
// the sockets: daemons come in wrappers.
func (s *supervisor) admit(ctx context.Context, pid int) (changed bool, err error) {
	m := s.member
	// Read first: a child of this list that has inherited the sockets did so before its parent is
	// asked. The member is who opened them, not a worker, which its master would start again.
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

// become finds the user, by name or number, that the daemon runs as.
func (s *supervisor) become(name string) (uid int, err error) {
	id, err := users.Find(name)
	if err != nil {
		return 0, err
	}
	s.as, s.env = &id, append(id.Environ(), s.Env...)
	return int(id.Credential.Uid), nil
}
