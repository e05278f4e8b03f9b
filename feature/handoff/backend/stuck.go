// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
)

// Stuck is a session whose move does not progress.
type Stuck struct {
	Service string        `json:"service"`
	Client  string        `json:"client"` // address and port
	For     time.Duration `json:"for_ns"` // since its move's start
	Reason  string        `json:"reason"`
}

// stuckAfter is the duration of a move from which its session counts as stuck.
const stuckAfter = 3 * time.Second

// stuck returns the stuck sessions, oldest first.
func (a *Agent) stuck(now time.Time) (out []Stuck) {
	leaving, arriving := a.all()
	add := func(id peer.Flow, service string, since time.Time, why string) {
		if d := now.Sub(since); d >= stuckAfter && why != "" {
			out = append(out, Stuck{Service: service, Client: id.Client.String(), For: d, Reason: why})
		}
	}
	for _, s := range leaving {
		why := "it is being dumped, or sent"
		if s.mu.TryLock() { // otherwise it is in use
			why = a.sendingReason(s)
			s.mu.Unlock()
		}
		add(s.id, s.by.service, s.since, why)
	}
	for _, r := range arriving {
		if !r.mu.TryLock() {
			continue // it is being restored
		}
		add(r.id, r.home.service, r.since, a.receivingReason(r))
		r.mu.Unlock()
	}
	slices.SortFunc(out, func(x, y Stuck) int { return cmp.Compare(y.For, x.For) })
	return out
}

// sendingReason returns why a departing session waits. s.mu is held.
func (a *Agent) sendingReason(s *sending) string {
	switch {
	case s.back:
		return a.waitReason(s.id)
	case s.src.Phase == move.Moving && a.known.Load().links[s.to] == nil:
		return fmt.Sprintf("%s is no longer known", a.backendName(s.to))
	case s.src.Phase == move.Moving:
		return a.backendName(s.to) + " has not answered"
	}
	return a.lbReason()
}

// receivingReason returns why an arriving session waits; "" if a member has it. r.mu is held.
func (a *Agent) receivingReason(r *receiving) string {
	switch {
	case r.dst.Phase == move.Flipping:
		return a.lbReason()
	case r.dst.Phase == move.Active && r.fd >= 0:
		return a.waitReason(r.id)
	}
	return ""
}

func (a *Agent) lbReason() string {
	if a.lb.conn() == nil {
		return "the load balancer's agent is not connected"
	}
	return "the load balancer has not answered"
}

// waitsFor records why a session has no member yet; nil: it has one.
func (a *Agent) waitsFor(id peer.Flow, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err == nil {
		delete(a.waits, id)
		return
	}
	a.waits[id] = err.Error()
}

func (a *Agent) waitReason(id peer.Flow) string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return cmp.Or(a.waits[id], "it is being given to a member")
}
