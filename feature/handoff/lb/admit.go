// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"fmt"

	"github.com/weir-project/weir/feature/handoff/peer"
)

// admits returns nil if an agent may connect as a backend. Its number and name must match a configured backend. With Register a
// new backend may connect, with a name and number nobody else has. The caller holds mu.
func (a *Agent) admits(h peer.Hello) error {
	if h.Role != peer.BackendAgent || h.Number == 0 || h.Number > MaxBackends {
		return fmt.Errorf("not a backend, or no number from 1 to %d: set handoff.backend.number", MaxBackends)
	}
	if name, ok := a.names[h.Number]; ok {
		if name != h.Name {
			return fmt.Errorf("backend %d is %s: give each backend a number of its own", h.Number, name)
		}
		return nil
	}
	if !a.o.Manage || !a.o.Register {
		return fmt.Errorf("unknown backend: name it in lb.backends, or set lb.register: true")
	}
	for number, name := range a.names {
		if name == h.Name {
			return fmt.Errorf("backend %s has number %d: set handoff.backend.number to it, or change lb.backends", name, number)
		}
	}
	if m := a.members[h.Number]; m != nil && m.Name != h.Name {
		return fmt.Errorf("number %d belongs to backend %s: use another number", h.Number, m.Name)
	}
	for _, m := range a.members {
		if m.Name == h.Name && m.Number != h.Number {
			return fmt.Errorf("backend %s has number %d: a backend keeps its number", m.Name, m.Number)
		}
	}
	return nil
}

// silentAfter is the number of unanswered pings after which an agent's connection no longer blocks a duplicate.
const silentAfter = 2

// duplicate rejects a second backend with the name, number and certificate of a connected one, for example a cloned machine. The
// two would take flows from each other and reset them.
//
// An agent may replace its own connection after a restart. It is the same agent if its instance or its address is the same, or if
// the old connection does not answer pings. The caller holds mu.
func (a *Agent) duplicate(c *peer.Conn) error {
	before := a.backends[c.Peer.Number]
	if before == nil || before.Peer.Instance == c.Peer.Instance || before.Unanswered() >= silentAfter || before.Remote() == c.Remote() {
		return nil
	}
	return fmt.Errorf("%s (number %d) is connected from %s: give the backend at %s a name, number and certificate of its own",
		c.Peer.Name, c.Peer.Number, before.Remote(), c.Remote())
}
