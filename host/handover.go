// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/weir-project/weir/feature/handoff"
	"github.com/weir-project/weir/feature/steer"
	"github.com/weir-project/weir/service"
)

// Steering says which slot has a router's traffic; handing over moves live sessions
// between members. Here they meet: a change of steering takes the sessions of its
// routers along, where their members can hand them over. See docs/HANDOFF.md, "When
// steering changes", for what is exact.

// holdTime is how long a member has to let go of its sessions before a change: those
// of one that does not are moved, or reset, after it. Variable for tests, whose machines
// stand still for longer.
var holdTime = 500 * time.Millisecond

// Handed is a session that went with its router.
type Handed struct {
	Service string
	steer.Session
}

// held are sessions that wait at the keeper while steering changes.
type held struct {
	*handoff.Director
	report   handoff.Report
	sessions map[string][]steer.Session // by service
}

// Switch makes a change of steering. Of the sessions that foresee says it misplaces,
// those whose members can hand them over wait meanwhile at the keeper behind socket, and
// go to the member whose they are then; each is told of them. The others are as without
// it: steer.ResetDue. Where no keeper answers, it is change alone.
func (h *Host) Switch(ctx context.Context, socket string, foresee func() ([]steer.Foreseen, error), change func() error, each func(Handed)) error {
	w := h.hold(ctx, socket, foresee)
	err := change()
	if w != nil {
		defer w.Close()
		w.release(context.WithoutCancel(ctx), h, each) // also after Ctrl-C
	}
	return err
}

// hold has sessions wait. It is for the better only: whatever goes wrong, the change is
// made without it.
func (h *Host) hold(ctx context.Context, socket string, foresee func() ([]steer.Foreseen, error)) *held {
	report, err := handoff.Status(ctx, socket)
	if err != nil || !hasSessions(report) {
		return nil
	}
	foreseen, err := foresee()
	if err != nil {
		return nil
	}
	w := &held{report: report, sessions: map[string][]steer.Session{}}
	var ids []uint64
	for _, f := range foreseen {
		known := kept(report, f.Service)
		for _, s := range f.Sessions {
			if _, ok := known[s.Cookie()]; ok {
				ids = append(ids, s.Cookie())
				w.sessions[f.Service] = append(w.sessions[f.Service], s)
			}
		}
	}
	if len(ids) == 0 {
		return nil
	}
	if w.Director, err = handoff.Direct(ctx, socket); err != nil {
		return nil
	}
	parked, _, err := w.Park(ctx, holdTime, ids...)
	if err != nil {
		w.Close()
		return nil
	}
	for name, all := range w.sessions {
		w.sessions[name] = slices.DeleteFunc(all, func(s steer.Session) bool { return !slices.Contains(parked, s.Cookie()) })
	}
	return w
}

// release lets the sessions go to whom they belong now, or back.
func (w *held) release(ctx context.Context, h *Host, each func(Handed)) {
	st, err := steer.ReadState(ctx, h.Root)
	to := map[uint64]string{}
	for name, all := range w.sessions {
		for _, x := range all {
			to[x.Cookie()] = "" // back
		}
		if s, serr := st.Service(name); err == nil && serr == nil {
			maps.Copy(to, heirs(w.report, s, all))
		}
	}
	back, err := w.Release(ctx, to)
	if err != nil {
		return // the keeper has gone, or lets go of them by itself
	}
	owner := owners(w.report)
	for name, all := range w.sessions {
		for _, s := range all {
			if to[s.Cookie()] != owner[s.Cookie()] && to[s.Cookie()] != "" && back[s.Cookie()] == nil {
				each(Handed{name, s})
			}
		}
	}
}

// heirs are the members, by name, at whose slots sessions belong now; "" where there is
// none that takes sessions.
func heirs(report handoff.Report, s *steer.ServiceState, all []steer.Session) map[uint64]string {
	to, members := map[uint64]string{}, membersOf(report, s)
	for _, x := range all {
		to[x.Cookie()] = ""
		if p, err := s.Where(steer.WhatIf{}, x.Remote.Addr().Unmap()); err == nil {
			to[x.Cookie()] = members.at(p[0]).Name
		}
	}
	return to
}

// slotMembers are a service's members at the keeper, by the processes of its slots.
type slotMembers struct {
	members []handoff.MemberReport
	tree    service.Tree
}

func membersOf(report handoff.Report, s *steer.ServiceState) (out slotMembers) {
	for _, r := range report.Services {
		if r.Name == s.Name {
			out.members = r.Members
		}
	}
	tree, err := service.ReadTree()
	if err != nil {
		out.members = nil
	}
	out.tree = tree
	return out
}

// at is the member that serves a place: the youngest that is ready of the slot's process
// and its descendants, else of the slot's number as its name.
func (m slotMembers) at(p steer.Place) (best handoff.MemberReport) {
	slot := p.Slot
	if p.Instead != nil {
		slot = *p.Instead
	}
	if p.PID == 0 {
		return best // nobody is at the slot
	}
	pids := m.tree.Descendants([]int{p.PID})
	for _, x := range m.members { // by age
		if slices.Contains(pids, x.PID) && (x.Ready || !best.Ready) {
			best = x
		}
	}
	if best.PID == 0 {
		for _, x := range m.members {
			if x.Name == strconv.Itoa(slot) && (x.Ready || !best.Ready) {
				best = x
			}
		}
	}
	return best
}

func hasSessions(r handoff.Report) bool {
	return slices.ContainsFunc(r.Services, func(s handoff.ServiceReport) bool { return len(s.Sessions) > 0 })
}

// kept are the sessions of a service that a keeper has, by number, and whether they wait
// for a member.
func kept(r handoff.Report, service string) map[uint64]bool {
	out := map[uint64]bool{}
	for _, s := range r.Services {
		for _, x := range s.Sessions {
			if id, err := strconv.ParseUint(x.ID, 10, 64); err == nil && s.Name == service && x.Kind == "session" {
				out[id] = x.PID == 0
			}
		}
	}
	return out
}

// owners are the members, by name, whose sessions are, or were, where they wait.
func owners(r handoff.Report) map[uint64]string {
	out := map[uint64]string{}
	for _, s := range r.Services {
		for _, x := range s.Sessions {
			if id, err := strconv.ParseUint(x.ID, 10, 64); err == nil {
				out[id] = x.Member
			}
		}
	}
	return out
}

// Movable says of sessions that a change would misplace whether the keeper behind socket
// has them: then their member is asked to hand them over, and they are reset only if it
// does not.
func (h *Host) Movable(ctx context.Context, socket string) func(service string, s steer.Session) bool {
	report, err := handoff.Status(ctx, socket)
	return func(service string, s steer.Session) bool {
		_, ok := kept(report, service)[s.Cookie()]
		return err == nil && ok
	}
}

// Hand is what becomes of sessions that are misplaced, before they are reset: those that
// the keeper behind socket has go to the member of their slot, if it takes sessions.
// Those that wait at the keeper for a member wait on: it has just died, and comes back.
func (h *Host) Hand(socket string) steer.Hand {
	return func(ctx context.Context, s *steer.ServiceState, misplaced []steer.Session) (stay, handed []steer.Session) {
		report, err := handoff.Status(ctx, socket)
		if err != nil {
			return misplaced, nil
		}
		known, owners := kept(report, s.Name), owners(report)
		mine := slices.DeleteFunc(slices.Clone(misplaced), func(x steer.Session) bool { _, ok := known[x.Cookie()]; return !ok })
		to := heirs(report, s, mine)
		there := map[uint64]bool{} // given to the right member, which has not taken it yet
		maps.DeleteFunc(to, func(id uint64, name string) bool {
			there[id] = name != "" && !known[id] && owners[id] == name
			return there[id] || name == ""
		})
		to = move(ctx, socket, to)
		for _, x := range misplaced {
			switch id := x.Cookie(); {
			case to[id] != "":
				handed = append(handed, x)
			case !known[id] && !there[id]:
				stay = append(stay, x)
			}
		}
		return stay, handed
	}
}

// move has sessions go to members, by name, and returns those that did.
func move(ctx context.Context, socket string, to map[uint64]string) map[uint64]string {
	if len(to) == 0 {
		return nil
	}
	d, err := handoff.Direct(ctx, socket)
	if err != nil {
		return nil
	}
	defer d.Close()
	var ids []uint64
	for id := range to {
		ids = append(ids, id)
	}
	parked, _, err := d.Park(ctx, holdTime, ids...)
	if err != nil {
		return nil
	}
	gone := map[uint64]string{}
	for _, id := range parked {
		gone[id] = to[id]
	}
	back, err := d.Release(ctx, gone)
	if err != nil {
		return nil
	}
	for id := range back {
		delete(gone, id)
	}
	return gone
}
