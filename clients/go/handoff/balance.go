// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"strings"
	"sync"
	"time"

	"github.com/weir-project/weir/feature/handoff/wire"
)

// SetLoad tells the other members how much work waits here, for example sessions ready but not
// being served. The service chooses the unit. Call it at every change. A change from or to 0 is
// sent at once. Other changes are sent at most every 2 ms.
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

// ownLoad is this member's reported load.
type ownLoad struct {
	is, said uint32
	told     bool
	at       time.Time
	timer    *time.Timer
}

// tellLoad tells the keeper. m.mu is held. An absent keeper is told on reconnect.
func (m *Member) tellLoad() {
	m.load.said, m.load.told, m.load.at = m.load.is, true, time.Now()
	if c := m.conn.Load(); c != nil {
		_ = c.TrySend(&wire.Message{Type: wire.Load, Number: m.load.said})
	}
}

// Loads returns the reported loads of the other members by name. A member of another server is "@"
// and its name. Options.Balances must be set.
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

// Balancer chooses a better member for a session. Servers share load with it: a member with much
// waiting work hands sessions to an idle one, on this server or another. It then reports its lower
// load by SetLoad. The zero value with Member set is ready to use. A move costs about a millisecond
// of both servers' time, so the waiting work must be worth it.
type Balancer struct {
	Member *Member // with Options.Balances
	// Threshold is the minimum load here for a move; default 4.
	Threshold int
	// Gain is how much lower the other load must be; default Threshold. It is the hysteresis: two
	// members with loads differing by less never move sessions between them.
	Gain int
	// Rest is the minimum stay of a session after its arrival; default 200 ms.
	Rest time.Duration

	mu    sync.Mutex
	given map[string]lent // given to others and not yet in their reported loads
}

type lent struct {
	n    int
	seen int       // their load at that time
	at   time.Time // of the latest one
}

// forgetAfter is the maximum delay before a given session shows in the reported load.
const forgetAfter = 50 * time.Millisecond

// Where returns the member to receive one of the waiting sessions, "" if all should stay. waiting
// is the load here. The caller transfers the session. If that fails, it calls GaveNot.
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
		if n > g.seen || now.Sub(g.at) > forgetAfter { // included in their load by now, or never will be
			g = lent{}
			delete(b.given, name)
		}
		n += g.n
		// Of equal loads prefer this server, because a local move costs less.
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

// GaveNot withdraws a session counted as given by Where.
func (b *Balancer) GaveNot(name string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if g := b.given[name]; g.n > 0 {
		g.n--
		b.given[name] = g
	}
}

// Rests reports whether a session arrived too recently to move again.
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
