// SPDX-License-Identifier: Apache-2.0

package server

import (
	"math"

	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/feature/handoff/wire"
)

// loadHere tells the other servers what waits here: for the member of this server for which the least does, as it is the one
// that gets what comes.
func (a *Agent) loadHere(p *place, member string, n uint32) {
	if wire.Elsewhere(member) {
		return
	}
	a.mu.Lock()
	of := a.loads[p.service.Name]
	if of == nil {
		of = map[string]uint32{}
		a.loads[p.service.Name] = of
	}
	of[member] = n
	least := leastOf(of)
	a.mu.Unlock()
	for _, c := range a.listeners() {
		_ = c.SendLoad(p.service.ID, least)
	}
	if c := a.front.conn(); c != nil {
		_ = c.SendLoad(p.service.ID, least)
	}
}

func leastOf(of map[string]uint32) uint32 {
	least := uint32(math.MaxUint32)
	for _, v := range of {
		least = min(least, v)
	}
	return least
}

// tellLoads tells a server that has connected what waits here.
func (a *Agent) tellLoads(c *peer.Conn) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for name, of := range a.loads {
		_ = c.SendLoad(a.known.Load().services[name].ID, leastOf(of))
	}
}

// loadThere tells the members of this server what waits at another.
func (a *Agent) loadThere(from Remote, service uint16, n uint32) {
	for _, p := range a.known.Load().away[from.Number] {
		if p.service.ID == service {
			_ = p.post(&wire.Message{Type: wire.Load, Number: n})
		}
	}
}

// listeners are the agents that have connected here, and hear what is said of loads.
func (a *Agent) listeners() []*peer.Conn {
	a.mu.Lock()
	defer a.mu.Unlock()
	out := make([]*peer.Conn, 0, len(a.attended))
	for c := range a.attended {
		out = append(out, c)
	}
	return out
}
