// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"cmp"
	"context"
	"encoding/json"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/feature/handoff/wire"
)

// Types of a keeper's report.
type (
	Counts  = handoff.Counts
	Report  = handoff.Report
	Service = handoff.ServiceReport
	Member  = handoff.MemberReport
	Session = handoff.SessionReport
)

// Report returns the full report.
func (k *Keeper) Report() Report { return k.buildReport(func(string) bool { return true }, nil) }

// buildReport reports on the allowed services, and on the sessions visible to a process; nil: all.
func (k *Keeper) buildReport(may func(service string) bool, by *process) Report {
	k.catchUpAll(may)
	k.mu.Lock()
	defer k.mu.Unlock()
	out := Report{Services: []Service{}, Strange: k.refused}
	for _, s := range k.sessions {
		out.State += s.size() // the actual state; k.state includes reservations
	}
	for _, name := range slices.Sorted(maps.Keys(k.services)) {
		if may(name) {
			out.Services = append(out.Services, k.services[name].report(time.Now(), by))
		}
	}
	return out
}

func (v *service) report(now time.Time, by *process) Service {
	out := Service{Name: v.name, Counts: v.counts, Members: []Member{}, Sessions: []Session{}}
	for _, m := range v.members {
		out.Members = append(out.Members, Member{Name: m.name, PID: m.process.PID, UID: m.process.UID, Ready: m.ready, Standby: m.standby, Since: m.since, Sessions: len(m.sessions)})
	}
	for _, s := range v.sessions {
		if by != nil && !by.may(s.user) {
			continue
		}
		x := Session{ID: strconv.FormatUint(s.id, 10), Kind: s.kind.String(), Local: s.local.String(), Label: s.label, Member: s.member,
			Since: s.since, Read: s.read, Written: s.written, State: s.size(), Moves: s.moves, Rejected: s.refused, ReturnReason: s.reason}
		if s.remote.IsValid() {
			x.Remote = s.remote.String()
		}
		if s.owner != nil {
			x.PID = s.owner.process.PID
			_, x.Given = s.owner.given[s.id]
		} else {
			x.Waits = now.Sub(s.waits).Seconds()
		}
		out.Sessions = append(out.Sessions, x)
	}
	slices.SortFunc(out.Sessions, func(a, b Session) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), a.Since.Compare(b.Since), cmp.Compare(a.ID, b.ID))
	})
	return out
}

// may returns a filter for the services visible to a process: the ones open to it as a member.
func (k *Keeper) may(ctx context.Context, m *member) func(service string) bool {
	return func(service string) bool {
		// Not under the lock: Allow may ask systemd.
		return k.authorise(ctx, service, m.name, m.process) == nil
	}
}

// report answers Status.
func (k *Keeper) report(ctx context.Context, m *member, msg *wire.Message, fds []int) []int {
	done, ok := k.awaitTurn(ctx, m.process)
	if !ok {
		return fds
	}
	defer done()
	k.mu.Lock()
	names := slices.Collect(maps.Keys(k.services))
	k.mu.Unlock()
	may, allowed := k.may(ctx, m), map[string]bool{}
	for _, n := range names {
		allowed[n] = may(n)
	}
	r := k.buildReport(func(s string) bool { return allowed[s] }, m.process)
	cost := reportCost + time.Duration(len(names))*memberCost
	for _, s := range r.Services {
		cost += time.Duration(len(s.Sessions)) * sessionCost
	}
	if !m.process.trusted() {
		r.State, r.Strange = 0, 0
	}
	text, err := json.Marshal(r)
	if !m.process.trusted() {
		k.tolls.charge(m.process.UID, cost+time.Duration(len(text)>>10)*kibCost, time.Now())
	}
	answer := wire.Message{Type: wire.Report, Seq: msg.Seq, State: text}
	if err == nil {
		var fd int
		if fd, err = answer.Spill(); fd >= 0 {
			defer unix.Close(fd)
			m.conn.SendWithin(time.Second, &answer, fd)
			return fds
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.reply(m, msg, &answer, err)
	return fds
}

// directs returns an error if a process may not direct a session, or a service's sessions.
func (k *Keeper) directs(ctx context.Context, m *member, session uint64, name string) error {
	k.mu.Lock()
	if s := k.sessions[session]; s != nil {
		name = s.service.name
	}
	k.mu.Unlock()
	if !k.may(ctx, m)(name) {
		return wire.Errorf(wire.NotMember, "user %d may not direct sessions of service %q", m.process.UID, name)
	}
	return nil
}

// ask requests the owner of a session, or of all sessions of a member, to move it.
func (k *Keeper) ask(ctx context.Context, m *member, msg *wire.Message) (*wire.Message, error) {
	name, from, _ := strings.Cut(msg.Text, "/")
	if err := k.directs(ctx, m, msg.Session, name); err != nil {
		return nil, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if s := k.sessions[msg.Session]; msg.Session != 0 && s != nil {
		name = s.service.name
	}
	v := k.services[name]
	if v == nil {
		return nil, wire.Errorf(wire.NoSession, "no such service or session: weir handoff status shows them")
	}
	owner := v.youngest(from, m.process)
	if msg.Session != 0 {
		s := v.sessions[msg.Session]
		switch {
		case s == nil || s.kind != wire.Stream:
			return nil, wire.Errorf(wire.NoSession, "no session %d: weir handoff status shows them", msg.Session)
		case s.owner == nil || s.owner.gone:
			return nil, wire.Errorf(wire.NoSession, "session %d is waiting for a member", msg.Session)
		}
		owner = s.owner
		if err := s.directs(m.process); err != nil {
			return nil, err
		}
	}
	switch {
	case owner == nil:
		return nil, wire.Errorf(wire.NoPeer, "service %s has no member %q", name, from)
	case owner.caps&wire.Moves == 0:
		return nil, wire.Errorf(wire.Unable, "member %s (process %d) does not move sessions on request", owner.name, owner.process.PID)
	}
	owner.send(msg.Name, m)
	if _, err := k.peer(owner, msg.Name, time.Now()); err != nil {
		return nil, err
	}
	k.post(owner, outgoing{message: wire.Message{Type: wire.Move, Session: msg.Session, Name: msg.Name}})
	return nil, nil
}
