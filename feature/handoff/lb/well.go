// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
)

// silent reports whether an agent has missed more than one ping and its timeout has passed. The time alone proves nothing,
// because this process may have been suspended.
func (a *Agent) silent(c *peer.Conn) bool {
	return time.Since(c.Heard()) > a.o.AgentTimeout && c.Unanswered() > 1
}

// well reports whether a backend should get new flows. The caller holds mu.
func (a *Agent) well(m *member) bool {
	c := a.backends[m.Number]
	m.agent = m.agent || c != nil
	switch {
	case m.placed.IsZero():
		return false
	case m.rival != "":
		m.reason = fmt.Sprintf("backend %s is at the same location, %s: give it a machine of its own, or stop one of the two", m.rival, m.location.Key())
		return false
	case m.Check != "":
		if m.up {
			return m.check.bad < checkFall
		}
		return m.check.good >= checkRise
	case c == nil && m.word != nil && m.word.Connected:
		if up, yes := a.byWord(m); yes {
			m.reason = "reported by the partner"
			return up
		}
		m.reason = "its agent is not connected, and was last at the partner"
	case !m.agent:
		return true
	case c == nil:
		m.reason = "its agent is not connected"
	case a.silent(c):
		m.reason = fmt.Sprintf("its agent has been silent for %s", time.Since(c.Heard()).Round(100*time.Millisecond))
	default:
		m.reason = ""
		return true
	}
	return false
}

// mayReturn removes backends that are in no file and cannot register.
func (a *Agent) mayReturn(backends map[move.Backend]bool) map[move.Backend]bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	maps.DeleteFunc(backends, func(n move.Backend, _ bool) bool { return a.members[n] == nil && !a.o.Register })
	return backends
}

// removeBackends lets the data path assign the flows of removed backends to others.
func (a *Agent) removeBackends() {
	a.f.mu.Lock()
	vacant := slices.Collect(maps.Keys(a.f.vacant))
	a.f.mu.Unlock()
	for _, n := range vacant {
		if !a.removed(n) {
			continue
		}
		if err := a.f.removeBackend(n); err != nil {
			a.o.Log.Warn("cannot reassign flows of removed backend", "err", err)
		}
	}
}

// removed reports whether a backend is removed for good: neither the file nor the partner lists it, and it cannot register, or
// has not within IdleTimeout. A disconnected backend still has its sessions.
func (a *Agent) removed(n move.Backend) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.members[n] != nil, a.o.Register && time.Since(a.began) < a.o.IdleTimeout:
		return false
	case a.pair == nil:
		return true
	}
	d := a.pair
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.conn == nil {
		return time.Since(a.began) > wordFor && time.Since(d.lost) > wordFor
	}
	return d.names != nil && d.names[n] == ""
}
