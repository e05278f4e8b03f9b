// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"cmp"
	"context"
	"encoding/json"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/wire"
)

// Counts are what has happened in a service since the keeper began.
type Counts struct {
	Kept      uint64 `json:"kept"`       // sockets taken into keeping
	Commits   uint64 `json:"commits"`    // positions and states noted
	Transfers uint64 `json:"transfers"`  // sessions moved by their owners
	Rescued   uint64 `json:"rescued"`    // sessions given to another member after a crash
	Inherited uint64 `json:"inherited"`  // the same after an orderly leave, or a refusal
	Refused   uint64 `json:"refused"`    // transfers that could not be, or were not wanted
	Expired   uint64 `json:"expired"`    // sessions reset because nobody came for them
	Gaps      uint64 `json:"gaps"`       // sessions reset because their member had not committed
	Closed    uint64 `json:"closed"`     // sessions that were over when their member died
	OverLimit uint64 `json:"over_limit"` // sockets and states that were too many or too large
}

// Report is what a keeper keeps.
type Report struct {
	Services []Service `json:"services"`
	State    int64     `json:"state_bytes"`
	Strange  uint64    `json:"refused_processes"` // that are no members
}

// Service is a service as the keeper sees it.
type Service struct {
	Name     string    `json:"name"`
	Members  []Member  `json:"members"`
	Sessions []Session `json:"sessions"`
	Counts   Counts    `json:"counts"`
}

// Member is a process that is connected.
type Member struct {
	Name     string    `json:"name"`
	PID      int       `json:"pid"`
	UID      uint32    `json:"uid"`
	Ready    bool      `json:"ready"`
	Since    time.Time `json:"since"`
	Sessions int       `json:"sessions"`
}

// Session is a socket that is kept.
type Session struct {
	ID      string    `json:"id"`
	Kind    string    `json:"kind"`
	Local   string    `json:"local"`
	Remote  string    `json:"remote,omitempty"`
	Label   string    `json:"label,omitempty"`
	Member  string    `json:"member"` // its owner, or the last one
	PID     int       `json:"pid"`    // 0: it waits for a member
	Since   time.Time `json:"since"`
	Waits   float64   `json:"waits_seconds,omitempty"` // without an owner
	Read    uint64    `json:"read"`                    // as committed
	Written uint64    `json:"written"`
	State   int64     `json:"state_bytes"`
	Moves   int       `json:"moves"`
}

// Report tells all.
func (k *Keeper) Report() Report { return k.reportOf(func(string) bool { return true }) }

func (k *Keeper) reportOf(may func(service string) bool) Report {
	k.mu.Lock()
	defer k.mu.Unlock()
	out := Report{Services: []Service{}, State: k.state, Strange: k.refused}
	for _, name := range slices.Sorted(maps.Keys(k.services)) {
		if may(name) {
			out.Services = append(out.Services, k.services[name].report(time.Now()))
		}
	}
	return out
}

func (v *service) report(now time.Time) Service {
	out := Service{Name: v.name, Counts: v.counts, Members: []Member{}, Sessions: []Session{}}
	for _, m := range v.members {
		out.Members = append(out.Members, Member{m.name, m.process.PID, m.process.UID, m.ready, m.since, len(m.sessions)})
	}
	for _, s := range v.sessions {
		x := Session{ID: strconv.FormatUint(s.id, 10), Kind: s.kind.String(), Local: s.local.String(), Label: s.label, Member: s.member,
			Since: s.since, Read: s.read, Written: s.written, State: s.size(), Moves: s.moves}
		if s.remote.IsValid() {
			x.Remote = s.remote.String()
		}
		if s.owner != nil {
			x.PID = s.owner.process.PID
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

// may says of which services a process may hear and direct: those that it could be a
// member of.
func (k *Keeper) may(ctx context.Context, m *member) func(service string) bool {
	return func(service string) bool {
		// Not under the lock: Allow may ask systemd.
		return k.authorise(ctx, service, m.process) == nil
	}
}

// report answers Status.
func (k *Keeper) report(ctx context.Context, m *member, msg *wire.Message, fds []int) []int {
	k.mu.Lock()
	names := slices.Collect(maps.Keys(k.services))
	k.mu.Unlock()
	may, allowed := k.may(ctx, m), map[string]bool{}
	for _, n := range names {
		allowed[n] = may(n)
	}
	r := k.reportOf(func(s string) bool { return allowed[s] })
	if m.process.UID != 0 && int(m.process.UID) != os.Geteuid() {
		r.State, r.Strange = 0, 0
	}
	text, err := json.Marshal(r)
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

// ask has the owner of a session, or of all of a member's, move it.
func (k *Keeper) ask(ctx context.Context, m *member, msg *wire.Message) (*wire.Message, error) {
	may := k.may(ctx, m)
	name, from, _ := strings.Cut(msg.Text, "/")
	k.mu.Lock()
	if s := k.sessions[msg.Session]; msg.Session != 0 && s != nil {
		name = s.service.name
	}
	k.mu.Unlock()
	if !may(name) {
		return nil, wire.Errorf(wire.Refused, "user %d directs no sessions of service %q", m.process.UID, name)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	v := k.services[name]
	if v == nil {
		return nil, wire.Errorf(wire.NoSession, "no such service or session: weir handoff status shows them")
	}
	owner := v.youngest(from)
	if msg.Session != 0 {
		s := v.sessions[msg.Session]
		switch {
		case s == nil || s.kind != wire.Stream:
			return nil, wire.Errorf(wire.NoSession, "no session %d: weir handoff status shows them", msg.Session)
		case s.owner == nil || s.owner.gone:
			return nil, wire.Errorf(wire.NoSession, "session %d waits for a member itself", msg.Session)
		}
		owner = s.owner
	}
	switch {
	case owner == nil:
		return nil, wire.Errorf(wire.NoPeer, "service %s has no member %q", name, from)
	case owner.caps&wire.Moves == 0:
		return nil, wire.Errorf(wire.Unable, "member %s (process %d) does not move sessions on request", owner.name, owner.process.PID)
	}
	if _, err := k.peer(owner, msg.Name, time.Now()); err != nil {
		return nil, err
	}
	k.post(owner, outgoing{message: wire.Message{Type: wire.Move, Session: msg.Session, Name: msg.Name}})
	return nil, nil
}

func (v *service) youngest(name string) *member {
	for i := len(v.members) - 1; i >= 0; i-- {
		if v.members[i].name == name {
			return v.members[i]
		}
	}
	return nil
}
