// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"fmt"
	"time"

	"github.com/weir-project/weir/feature/handoff/peer"
)

// silent says whether an agent is: it was asked more than once since it has said something, and has had its time. Of the time alone
// this process may have slept.
func (a *Agent) silent(c *peer.Conn) bool {
	return time.Since(c.Heard()) > a.o.AgentTimeout && c.Unanswered() > 1
}

// well says whether a backend is to get new flows. The caller holds mu.
func (a *Agent) well(m *member) bool {
	c := a.backends[m.Number]
	m.agent = m.agent || c != nil
	switch {
	case m.placed.IsZero():
		return false
	case m.rival != "":
		m.reason = fmt.Sprintf("backend %s is at the same location, %s: take the address of another machine, or end one of both", m.rival, m.location.Key())
		return false
	case m.Check != "":
		if m.up {
			return m.check.bad < checkFall
		}
		return m.check.good >= checkRise
	case c == nil && m.word != nil && m.word.Connected:
		if up, yes := a.byWord(m); yes {
			m.reason = "as the partner says"
			return up
		}
		m.reason = "its agent is not connected, and was at the partner"
	case !m.agent:
		return true
	case c == nil:
		m.reason = "its agent is not connected"
	case a.silent(c):
		m.reason = fmt.Sprintf("its agent has said nothing for %s", time.Since(c.Heard()).Round(100*time.Millisecond))
	default:
		m.reason = ""
		return true
	}
	return false
}
