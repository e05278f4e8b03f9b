// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"cmp"
	"time"

	"github.com/weir-project/weir/feature/handoff/lb/flow"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/kernel"
)

// A backend's report alone makes flows known, so any backend could fill the table. Each backend, and all together, therefore have
// a limit for flows without a packet yet. These flows are removed soon after the backend's agent disconnects.

// reportedFor is how long a flow known by a report alone survives the disconnection of the backend's agent.
const reportedFor = 30 * time.Second

// census counts flows.
type census struct {
	owned   map[move.Backend]int    // by owner
	unseen  map[move.Backend]int    // flows known by a report alone, by reporting backend
	unasked map[move.Backend]int    // flows known by the owner's packets alone, by owner
	gone    map[move.Backend]bool   // backends without an agent for long, before the count
	away    func(move.Backend) bool // the same at the time of the call; the caller holds the lock of forget
	pair    *pairing                // nil: no partner
	crowded bool                    // too many doubtful flows, before the count
	slack   time.Duration           // for an agent's report by way of the partner
}

func newCensus() *census {
	return &census{owned: map[move.Backend]int{}, unseen: map[move.Backend]int{}, unasked: map[move.Backend]int{}, away: func(move.Backend) bool { return false }, slack: time.Minute}
}

func (c *census) count(fl Flow) {
	c.owned[fl.Owner]++
	if fl.Unseen() {
		c.unseen[cmp.Or(fl.Reporter, fl.Owner)]++
	}
	if fl.Unasked {
		c.unasked[fl.Owner]++
	}
}

func (c *census) unaskedFlows() (n int) {
	for _, of := range c.unasked {
		n += of
	}
	return n
}

// report records a flow reported by a backend, with the session there or at another backend. It counts against the reporting
// backend. The caller holds mu.
func (a *Agent) report(k Key, by move.Backend, fl move.Flow) error {
	if err := a.reports.Room(by, int(a.f.maps.LbFlows.MaxEntries())); err != nil {
		return err
	}
	err := a.f.learn(k, fl, kernel.Monotonic(), flow.Told|flow.Reported|flow.Named|uint32(by)<<flow.ReporterAt)
	if err == nil {
		a.reports.Add(by)
	}
	a.f.changed(k)
	return err
}

// away returns the time since a backend's agent disconnected here and at the partner, 0 if it is connected. The caller holds mu.
func (a *Agent) away(b move.Backend) time.Duration {
	m := a.members[b]
	if a.backends[b] != nil || m != nil && m.word != nil && m.word.Connected {
		return 0
	}
	if left, ok := a.left[b]; ok {
		return time.Since(left)
	}
	if o, _ := a.f.names.Owner(b); o.Left != 0 { // of an earlier agent
		return since(o.Left)
	}
	return time.Since(a.began)
}

// beginCensus starts a count. Flows learned during the count are counted twice until the next one.
func (a *Agent) beginCensus() *census {
	c := newCensus()
	c.away = func(b move.Backend) bool { return a.away(b) >= reportedFor }
	c.gone, c.pair = map[move.Backend]bool{}, a.pair
	a.mu.Lock()
	defer a.mu.Unlock()
	a.reports.Begin()
	for b := range MaxBackends + 1 {
		c.gone[b] = c.away(b)
	}
	return c
}

// drained reports whether a backend left with weight 0, as after weir handoff drain. The partner's word counts if the backend was
// connected there, and the partner has forgotten it. The caller holds mu.
func (a *Agent) drained(m *member) bool {
	return m.Weight == 0 && a.away(m.Number) > 0 && (m.said != nil || m.word != nil && a.pair.nameThere(m.Number) == "")
}

// endCensus stores the counts and marks owners without a location as vacant. It forgets registered backends without a flow after
// an absence of IdleTimeout, drained ones at once.
func (a *Agent) endCensus(c *census) {
	if err := a.f.noteVacant(c.owned); err != nil {
		a.o.Log.Warn("cannot detect removed backends", "err", err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.reports.End(c.unseen)
	if many := a.f.unasked.Load(); many != a.unasked {
		a.unasked = many
		if many {
			a.o.Log.Warn("too many unconfirmed flows, keeping them for 20 s only", "flows", c.unaskedFlows(), "by_backend", c.unasked)
		}
	}
	a.flowsOf = c.owned
	for number, m := range a.members {
		drained := a.drained(m)
		if m.told == nil && c.owned[number] == 0 && (drained || a.away(number) >= a.o.IdleTimeout) {
			if err := a.f.names.Loosen(number, drained); err != nil {
				a.o.Log.Warn("cannot free the number of a drained backend", "name", m.Name, "err", err)
			}
			a.o.Log.Info("forgetting absent backend", "name", m.Name, "number", number)
			delete(a.members, number)
			a.forgotten[number] = m.Name
			a.news = true
		}
	}
	if err := a.freeNumbers(c.owned); err != nil {
		a.o.Log.Warn("cannot free numbers of absent backends", "err", err)
	}
}
