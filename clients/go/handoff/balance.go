// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"strings"
	"sync"
	"time"

	"github.com/weir-project/weir/feature/handoff/wire"
)

// SetLoad tells the other members how much waits for this one: sessions that have something to do and are not being served, say.
// The unit is the service's own. It may be called at every change: they hear at once that nothing waits any more, or
// something does again, and of the rest no more often than every 2 ms.
func (m *Member) SetLoad(n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now, was := uint32(max(n, 0)), m.load.said
	m.load.is = now
	switch {
	case now == was && m.load.told:
	case (now == 0) != (was == 0) || !m.load.told || time.Since(m.load.at) >= loadEvery:
		m.tellLoad()
	case m.load.timer == nil:
		m.load.timer = time.AfterFunc(loadEvery, func() {
			m.mu.Lock()
			defer m.mu.Unlock()
			m.load.timer = nil
			if m.load.is != m.load.said {
				m.tellLoad()
			}
		})
	}
}

const loadEvery = 2 * time.Millisecond

// ownLoad is what a member says of itself.
type ownLoad struct {
	is, said uint32
	told     bool
	at       time.Time
	timer    *time.Timer
}

// tellLoad tells the keeper, with mu held. One that is gone hears it when it is back.
func (m *Member) tellLoad() {
	m.load.said, m.load.told, m.load.at = m.load.is, true, time.Now()
	if c := m.conn.Load(); c != nil {
		_ = c.TrySend(&wire.Message{Type: wire.Load, Number: m.load.said})
	}
}

// Loads is what waits for the others, as they say: by name, those of other servers as @ and its name. Options.Balances must
// be set.
func (m *Member) Loads() map[string]int {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make(map[string]int, len(m.loads))
	for name, n := range m.loads {
		out[name] = int(n)
	}
	return out
}

func (m *Member) setLoad(name string, n uint32) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if n == wire.NoLoad {
		delete(m.loads, name)
		return
	}
	m.loads[name] = n
}

// Balancer says where a session is served better. Servers share load by it: a member for which much waits hands sessions to one
// for which nothing does, here or on another server, and tells it by SetLoad that it has less now. Its zero value,
// with the Member, is of use. Moving costs about a millisecond of two servers' time: what waits must be worth it.
type Balancer struct {
	Member *Member // with Options.Balances
	// Threshold is how much must wait here before anything moves; default 4.
	Threshold int
	// Gain is how much less must wait there; default Threshold. It is the hysteresis: of two members whose loads
	// differ by less neither gives the other anything.
	Gain int
	// Rest is how long a session stays where it has come to; default 200 ms.
	Rest time.Duration

	mu    sync.Mutex
	given map[string]lent // what was given to others and is not in their loads yet
}

type lent struct {
	n    int
	seen int       // their load when it was given
	at   time.Time // the latest
}

// forgetAfter is how long a load may take to tell of a session that was given.
const forgetAfter = 50 * time.Millisecond

// Where names the member that should have one of the sessions that wait here; "" if they should stay. waiting is what waits
// here. The caller transfers the session, or says with GaveNot that it could not.
func (b *Balancer) Where(waiting int) string {
	if waiting < or(b.Threshold, 4) {
		return ""
	}
	loads := b.Member.Loads()
	now := time.Now()
	b.mu.Lock()
	defer b.mu.Unlock()
	best, least := "", 0
	for name, n := range loads {
		g := b.given[name]
		if n > g.seen || now.Sub(g.at) > forgetAfter { // it is in their load by now, or never will be
			g = lent{}
			delete(b.given, name)
		}
		n += g.n
		// Of two that are alike the nearer one: what stays on this server costs less.
		if best == "" || n < least || n == least && near(name) && !near(best) {
			best, least = name, n
		}
	}
	if best == "" || waiting-least < or(b.Gain, or(b.Threshold, 4)) {
		return ""
	}
	if b.given == nil {
		b.given = map[string]lent{}
	}
	g := b.given[best]
	b.given[best] = lent{g.n + 1, loads[best], now}
	return best
}

// GaveNot takes back what Where has counted as given.
func (b *Balancer) GaveNot(name string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if g := b.given[name]; g.n > 0 {
		g.n--
		b.given[name] = g
	}
}

// Rests says whether a session has come too lately to move again.
func (b *Balancer) Rests(s *Session) bool {
	rest := b.Rest
	if rest == 0 {
		rest = 200 * time.Millisecond
	}
	return s.received && time.Since(s.since) < rest
}

func near(name string) bool { return !strings.HasPrefix(name, "@") }

func or(n, otherwise int) int {
	if n == 0 {
		return otherwise
	}
	return n
}
