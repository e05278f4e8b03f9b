// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/feature/handoff/wire"
)

// Blocked is a session that blocks a drain.
type Blocked struct {
	Service string `json:"service"`
	Session string `json:"session"` // its number at the keeper
	Client  string `json:"client"`  // address and port
	Address string `json:"address"` // of the service
	Member  string `json:"member"`  // its slot: name of the session's current or last member
	PID     int    `json:"pid,omitempty"`
	Reason  string `json:"reason"`
}

func (b Blocked) String() string {
	return fmt.Sprintf("session %s, %s to %s, member %s of %s: %s", b.Session, b.Client, b.Address, b.Member, b.Service, b.Reason)
}

// asking has the sessions with a requested move, by the keeper's numbers. It is safe for concurrent use.
type asking struct {
	mu   sync.Mutex
	all  map[string]asked
	told map[string]string // logged reasons, by session
}

type asked struct {
	at      time.Time // time of the latest request
	first   time.Time
	refused int // rejected transfers before the request
	err     error
}

func (a *asking) reset() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.all, a.told = nil, nil
}

func (a *asking) add(s handoff.SessionReport, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	was := a.all[s.ID]
	is := asked{at: time.Now(), first: was.first, refused: s.Rejected, err: err}
	if is.first.IsZero() {
		is.first = is.at
	}
	if a.all == nil {
		a.all = map[string]asked{}
	}
	a.all[s.ID] = is
}

func (a *asking) of(s handoff.SessionReport) (asked, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	at, ok := a.all[s.ID]
	return at, ok
}

// when returns the time of the latest request for a session.
func (a *asking) when(s handoff.SessionReport) time.Time {
	at, _ := a.of(s)
	return at.at
}

// count returns the number of requests, and of successful ones.
func (a *asking) count() (all, could int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, at := range a.all {
		if at.err == nil {
			could++
		}
	}
	return len(a.all), could
}

// moves reports whether a session's move was requested recently, without an outcome yet.
func (a *asking) moves(s handoff.SessionReport, now time.Time) bool {
	at, ok := a.of(s)
	return ok && now.Sub(at.at) < drainAgain && at.err == nil && s.Rejected == at.refused
}

// blocked returns the blocking sessions of a keeper's report. Sessions waiting for their turn do not count.
func (a *Agent) blocked(r handoff.Report, now time.Time) (out []Blocked) {
	stuck := map[string]string{}
	for _, s := range a.stuck(now) {
		stuck[s.Client] = s.Reason
	}
	for _, v := range r.Services {
		if a.known.Load().home[v.Name] == nil {
			continue
		}
		for _, s := range v.Sessions {
			if s.Kind != wire.Stream.String() {
				continue
			}
			if why := a.blockedReason(s, stuck, now); why != "" {
				out = append(out, Blocked{Service: v.Name, Session: s.ID, Client: s.Remote, Address: s.Local, Member: s.Member, PID: s.PID, Reason: why})
			}
		}
	}
	return out
}

// waitsLong is the wait for a member, in seconds, after which a session counts as blocked.
const waitsLong = 1

// blockedReason returns why a session does not move; "": it moves, or waits for its turn.
func (a *Agent) blockedReason(s handoff.SessionReport, stuck map[string]string, now time.Time) string {
	asked, ok := a.asked.of(s)
	switch {
	case wire.Elsewhere(s.Member):
		return stuck[s.Remote]
	case s.PID == 0 && s.Waits > waitsLong:
		return fmt.Sprintf("no member %s is ready for it", s.Member)
	case s.PID == 0 || !ok:
		return ""
	case errors.Is(asked.err, wire.ErrUnable):
		return fmt.Sprintf("its member (process %d) does not move sessions on request: it ends by itself", s.PID)
	case asked.err != nil:
		return asked.err.Error()
	case s.ReturnReason != "":
		return s.ReturnReason
	case now.Sub(asked.first) > drainAgain:
		return fmt.Sprintf("its member (process %d) was asked to move it and has not released it", s.PID)
	}
	return ""
}

// tellBlocked logs each reason of a blocked session once.
func (a *Agent) tellBlocked(all []Blocked) {
	a.asked.mu.Lock()
	defer a.asked.mu.Unlock()
	if a.asked.told == nil {
		a.asked.told = map[string]string{}
	}
	for _, b := range all {
		if a.asked.told[b.Session] == b.Reason {
			continue
		}
		a.asked.told[b.Session] = b.Reason
		a.o.Log.Warn("session blocks the drain", "service", b.Service, "session", b.Session, "client", b.Client,
			"address", b.Address, "member", b.Member, "pid", b.PID, "err", b.Reason)
	}
}
