// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"math"

	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/feature/handoff/wire"
)

// loadHere reports the load of this backend to the others: the smallest load of a local member, because the least
// loaded member receives new sessions.
func (a *Agent) loadHere(p *keeperClient, member string, n uint32) {
	if wire.Elsewhere(member) {
		return
	}
	a.mu.Lock()
	of := a.loads[p.service]
	if of == nil {
		of = map[string]uint32{}
		a.loads[p.service] = of
	}
	if of[member] = n; n == wire.NoLoad { // it is gone
		delete(of, member)
	}
	a.unsaid[p.service] = true
	a.mu.Unlock()
	a.say()
}

// forgetLoads clears a service's loads, because a new keeper sends them again.
func (a *Agent) forgetLoads(service string) {
	a.mu.Lock()
	clear(a.loads[service])
	a.mu.Unlock()
	a.tell(service)
}

// tell schedules a report about a service.
func (a *Agent) tell(service string) {
	a.mu.Lock()
	a.unsaid[service] = true
	a.mu.Unlock()
	a.say()
}

func (a *Agent) say() {
	select {
	case a.says <- struct{}{}:
	default: // a wake-up is already pending
	}
}

// reportLoads sends the loads noted by loadHere. It is a goroutine of its own: an agent that does not read must not
// delay reading the keeper's answers.
func (a *Agent) reportLoads(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.says:
		}
		a.mu.Lock()
		var all []said
		know := a.known.Load()
		for name := range a.unsaid {
			if p := know.home[name]; p != nil {
				of := a.loads[name]
				all = append(all, said{know.number(name), minLoad(of), p.members.Load() == 0, of != nil})
			}
		}
		clear(a.unsaid)
		a.mu.Unlock()
		to, lb := a.listeners(), a.lb.conn()
		for _, s := range all {
			for _, c := range to {
				_ = c.SendLoad(s.service, s.least, s.none)
			}
			if lb != nil && s.known {
				_ = lb.SendLoad(s.service, s.least, s.none)
			}
		}
	}
}

// said is a report about a service.
type said struct {
	service uint16
	least   uint32
	none    bool // no member here
	known   bool // a member has reported its load
}

func minLoad(of map[string]uint32) uint32 {
	least := uint32(math.MaxUint32)
	for _, v := range of {
		least = min(least, v)
	}
	return least
}

// tellLoads schedules reports about all services, for a new connection.
func (a *Agent) tellLoads() {
	a.mu.Lock()
	for name := range a.known.Load().home {
		a.unsaid[name] = true
	}
	a.mu.Unlock()
	a.say()
}

// loadThere sends another backend's load to this backend's members, and remembers whether it has a member.
func (a *Agent) loadThere(from Remote, service uint16, n uint32, none bool) {
	if k := a.known.Load().links[from.Number]; k != nil {
		k.none.Store(service, none)
	}
	know := a.known.Load()
	for _, p := range know.away[from.Number] {
		if know.number(p.service) == service {
			_ = p.post(&wire.Message{Type: wire.Load, Number: n})
		}
	}
}

// listeners returns the connections from other agents. They receive loads.
func (a *Agent) listeners() []*peer.Conn {
	a.mu.Lock()
	defer a.mu.Unlock()
	out := make([]*peer.Conn, 0, len(a.attended))
	for c := range a.attended {
		out = append(out, c)
	}
	return out
}
