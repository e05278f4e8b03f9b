// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"cmp"
	"time"

	"github.com/weir-project/weir/feature/handoff/lb/flow"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/kernel"
)

// A backend's word alone makes flows known: any backend could fill the table with it. So of these flows, until a packet of them is
// seen, there is a limit for each backend and for all, and they go soon when the backend's agent does.

// reportedFor is how long flows stay known by the word of a backend alone, once its agent has gone.
const reportedFor = 30 * time.Second

// census counts flows.
type census struct {
	owned   map[move.Backend]int    // by owner
	unseen  map[move.Backend]int    // by the backend whose word is all that is known of them
	unasked map[move.Backend]int    // by the owner, whose packets are all that is known of them
	gone    map[move.Backend]bool   // whose agents have gone, before the count
	away    func(move.Backend) bool // still; called with the lock of forget
	pair    *pairing                // with a partner, or nil
	crowded bool                    // more doubtful flows than there is room for, before the count
	slack   time.Duration           // for the word of an agent, which may come by the partner
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

// report records a flow of which a backend says that a session is there, or at another backend. It counts against the one that says so.
// The caller holds mu.
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

// away says for how long a backend's agent has not been connected, here or at the partner; 0: it is. The caller holds mu.
func (a *Agent) away(b move.Backend) time.Duration {
	m := a.members[b]
	if a.backends[b] != nil || m != nil && m.word != nil && m.word.Connected {
		return 0
	}
	if left, ok := a.left[b]; ok {
		return time.Since(left)
	}
	return time.Since(a.began)
}

// beginCensus prepares a count. Flows that are learned while it goes on count twice until the next one.
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

// endCensus takes the counts, notes owners that may have been removed, and forgets backends that registered, have been away for
// idle_timeout, and have no flow.
func (a *Agent) endCensus(c *census) {
	if err := a.f.noteVacant(c.owned); err != nil {
		a.o.Log.Warn("it is not known which backends were removed", "err", err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.reports.End(c.unseen)
	if many := a.f.unasked.Load(); many != a.unasked {
		a.unasked = many
		if many {
			a.o.Log.Warn("backends send packets of connections that no client confirms, keeping these flows for 20 s", "flows", c.unaskedFlows(), "by_backend", c.unasked)
		}
	}
	for number, m := range a.members {
		if m.told == nil && c.owned[number] == 0 && a.away(number) >= a.o.IdleTimeout {
			a.o.Log.Info("a backend that has not been here for long is forgotten", "name", m.Name, "number", number)
			delete(a.members, number)
			a.forgotten[number] = m.Name
			a.news = true
		}
	}
}
