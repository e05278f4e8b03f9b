// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"math"

	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/feature/handoff/wire"
)

// loadHere tells the other backends what waits here: for the member of this backend for which the least does, as it is the one
// that gets what comes.
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
	if of[member] = n; n == wire.NoLoad { // it has gone
		delete(of, member)
	}
	a.unsaid[p.service] = true
	a.mu.Unlock()
	a.say()
}

// forgetLoads is for a keeper that tells them anew.
func (a *Agent) forgetLoads(service string) {
	a.mu.Lock()
	clear(a.loads[service])
	a.mu.Unlock()
	a.tell(service)
}

// tell has something said of a service.
func (a *Agent) tell(service string) {
	a.mu.Lock()
	a.unsaid[service] = true
	a.mu.Unlock()
	a.say()
}

func (a *Agent) say() {
	select {
	case a.says <- struct{}{}:
	default: // it has yet to look
	}
}

// reportLoads says what loadHere has noted, beside whoever hears the keeper: one that does not read must not keep the keeper's answers
// from those who wait for them.
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

// said is what others hear of a service.
type said struct {
	service uint16
	least   uint32
	none    bool // no member is here
	known   bool // a member has said what waits for it
}

func minLoad(of map[string]uint32) uint32 {
	least := uint32(math.MaxUint32)
	for _, v := range of {
		least = min(least, v)
	}
	return least
}

// tellLoads tells everybody again, of whom one has just connected, what waits here.
func (a *Agent) tellLoads() {
	a.mu.Lock()
	for name := range a.known.Load().home {
		a.unsaid[name] = true
	}
	a.mu.Unlock()
	a.say()
}

// loadThere tells the members of this backend what waits at another, and remembers whether somebody is there.
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
