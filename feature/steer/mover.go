// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"maps"
	"slices"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/reset"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/kernel"
)

// A change of steering moves sessions together with their routers if a feature.SessionMover has them. docs/HANDOFF.md,
// "When steering changes", describes the guarantees.

// Handed is a session moved with its router.
type Handed struct {
	Service string
	state.Session
}

// buffered is the sessions buffered during a change of steering.
type buffered struct {
	feature.BufferedSessions
	list     feature.MovableSessions
	sessions map[string][]state.Session // by service
}

// Switch makes a change of steering. It buffers the foreseen sessions of the mover during the change, then moves them
// to the member of their new slot and calls each for them. Other sessions stay until [reset.ResetDue]. A nil or
// unreachable mover does not prevent the change.
func Switch(ctx context.Context, r *kernel.Root, m feature.SessionMover, foresee func() ([]Foreseen, error), change func() error, each func(Handed)) error {
	b := bufferFor(ctx, m, foresee)
	err := change()
	if b != nil {
		defer b.Close()
		b.release(context.WithoutCancel(ctx), r, each) // also after Ctrl-C
	}
	return err
}

// bufferFor buffers the sessions of a change. Its failure only causes more resets.
func bufferFor(ctx context.Context, m feature.SessionMover, foresee func() ([]Foreseen, error)) *buffered {
	if m == nil {
		return nil
	}
	list, err := m.Sessions(ctx)
	if err != nil || list.Len() == 0 {
		return nil
	}
	foreseen, err := foresee()
	if err != nil {
		return nil
	}
	b := &buffered{list: list, sessions: map[string][]state.Session{}}
	var ids []uint64
	for _, f := range foreseen {
		for _, s := range f.Sessions {
			if _, kept := list.Kept(f.Service, s.Cookie()); kept {
				ids = append(ids, s.Cookie())
				b.sessions[f.Service] = append(b.sessions[f.Service], s)
			}
		}
	}
	if len(ids) == 0 {
		return nil
	}
	if b.BufferedSessions, err = list.Buffer(ctx, ids...); err != nil {
		return nil
	}
	for name, all := range b.sessions {
		b.sessions[name] = slices.DeleteFunc(all, func(s state.Session) bool { return !slices.Contains(b.IDs(), s.Cookie()) })
	}
	return b
}

// release gives the sessions to the members of their slots, or back to their owner.
func (b *buffered) release(ctx context.Context, r *kernel.Root, each func(Handed)) {
	st, err := state.Read(ctx, r)
	to := map[uint64]string{}
	for name, all := range b.sessions {
		for _, x := range all {
			to[x.Cookie()] = "" // back
		}
		if s, serr := st.Service(name); err == nil && serr == nil {
			maps.Copy(to, successors(b.list, s, all))
		}
	}
	back, err := b.Release(ctx, to)
	if err != nil {
		return // the mover has exited, or releases them itself
	}
	for name, all := range b.sessions {
		for _, s := range all {
			if id := s.Cookie(); to[id] != b.list.Owner(id) && to[id] != "" && back[id] == nil {
				each(Handed{name, s})
			}
		}
	}
}

// successors returns the new members of sessions by name, or "" if the member accepts no sessions.
func successors(list feature.MovableSessions, s *state.Service, all []state.Session) map[uint64]string {
	to := map[uint64]string{}
	for _, x := range all {
		to[x.Cookie()] = ""
		p, err := s.Where(state.WhatIf{}, x.Remote.Addr().Unmap())
		if err != nil {
			continue
		}
		slot := p[0].Slot
		if p[0].Instead != nil {
			slot = *p[0].Instead
		}
		to[x.Cookie()] = list.Member(s.Name, slot, p[0].PID)
	}
	return to
}

// Movable returns a function that reports whether the mover has a session. Its member is then asked to hand it over. It
// is reset only if the handover fails.
func Movable(ctx context.Context, m feature.SessionMover) func(service string, s state.Session) bool {
	if m == nil {
		return func(string, state.Session) bool { return false }
	}
	list, err := m.Sessions(ctx)
	return func(service string, s state.Session) bool {
		if err != nil {
			return false
		}
		_, kept := list.Kept(service, s.Cookie())
		return kept
	}
}

// HandBy returns a function that moves misplaced sessions before their reset. A session of the mover goes to the member
// of its slot, if this member accepts sessions. A session of a dead member keeps waiting for it. A nil mover gives nil.
func HandBy(m feature.SessionMover) reset.Hand {
	if m == nil {
		return nil
	}
	return func(ctx context.Context, s *state.Service, misplaced []state.Session) (stay, handed []state.Session) {
		list, err := m.Sessions(ctx)
		if err != nil {
			return misplaced, nil
		}
		kept := func(x state.Session) bool { _, kept := list.Kept(s.Name, x.Cookie()); return kept }
		mine := slices.DeleteFunc(slices.Clone(misplaced), func(x state.Session) bool { return !kept(x) })
		to := successors(list, s, mine)
		there := map[uint64]bool{} // given to the right member, but not accepted yet
		maps.DeleteFunc(to, func(id uint64, name string) bool {
			waits, _ := list.Kept(s.Name, id)
			there[id] = name != "" && !waits && list.Owner(id) == name
			return there[id] || name == ""
		})
		to = giveTo(ctx, list, to)
		for _, x := range misplaced {
			id := x.Cookie()
			waits, _ := list.Kept(s.Name, id)
			switch {
			case to[id] != "":
				handed = append(handed, x)
			case !waits && !there[id]:
				stay = append(stay, x)
			}
		}
		return stay, handed
	}
}

// giveTo gives sessions to members by name, and returns the accepted ones.
func giveTo(ctx context.Context, list feature.MovableSessions, to map[uint64]string) map[uint64]string {
	if len(to) == 0 {
		return nil
	}
	b, err := list.Buffer(ctx, slices.Collect(maps.Keys(to))...)
	if err != nil {
		return nil
	}
	defer b.Close()
	gone := map[uint64]string{}
	for _, id := range b.IDs() {
		gone[id] = to[id]
	}
	back, err := b.Release(ctx, gone)
	if err != nil {
		return nil
	}
	for id := range back {
		delete(gone, id)
	}
	return gone
}

// WithMover implements feature.MoverUser.
func (f Feature) WithMover(m feature.SessionMover) feature.Runner {
	f.Hand = HandBy(m)
	return f
}
