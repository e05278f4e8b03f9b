// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/kernel"
)

// Status is what a load balancer does.
type Status struct {
	Name     string `json:"name"`
	Netns    string `json:"netns"`    // inode number of its network namespace
	Agent    bool   `json:"agent"`    // whether its agent answers; without one there is no Backends
	Counts   Counts `json:"counts"`   // since it was made
	Flows    int    `json:"flows"`    // that it knows
	Buffered int    `json:"buffered"` // of them, whose packets wait
	Moving   int    `json:"moving"`   // of them, that are being moved
	// Settling: it has begun anew, and packets of unknown connections wait for the backends to say which are theirs.
	Starting bool            `json:"starting,omitempty"`
	Backends []BackendStatus `json:"backends,omitempty"` // by number
	Partner  *PairStatus     `json:"partner,omitempty"`  // nil: there is none

	Certificate *peer.Certificate `json:"certificate,omitempty"` // of the agent
}

// PairStatus is how two load balancers stand to each other, as the agent of one sees it.
type PairStatus struct {
	Name      string `json:"name"`
	Connected bool   `json:"connected"`
	// Silent is for how long nothing was heard of it, connected or not; 0: it is heard. -1: nothing since the agent began.
	Silent  float64 `json:"silent_seconds"`
	Agents  int     `json:"agents"`  // of backends, that are connected to it
	Carries bool    `json:"carries"` // clients' packets come by this load balancer
	There   bool    `json:"there"`   // and by the partner, as it says
	Told    uint64  `json:"told"`    // flows, since the agent began
	Heard   uint64  `json:"heard"`
	// Apart: clients' packets come by here, the partner is not heard, and agents of backends that were at the partner are not here. It
	// has ended a moment ago, or both go on without each other.
	Apart bool `json:"apart"`
	// Seconds and Dropped are for how long both carried clients' packets, or were apart, and what this one dropped meanwhile of
	// flows that are not where it knows them.
	Seconds float64 `json:"split_seconds"`
	Dropped uint64  `json:"split_dropped"`
}

// BackendStatus is a backend as the agent sees it.
type BackendStatus struct {
	Name      string       `json:"name,omitempty"`
	Number    move.Backend `json:"number"`
	Address   netip.Addr   `json:"address,omitzero"`
	Where     string       `json:"where,omitempty"` // the interface, or tunnel
	Weight    int          `json:"weight"`
	Up        bool         `json:"up"`
	Reason    string       `json:"reason,omitempty"`   // it is not
	Unserved  []string     `json:"unserved,omitempty"` // services that nobody serves there: others get their new flows
	Connected bool         `json:"connected"`          // its agent
	Silent    float64      `json:"silent_seconds"`     // of an agent that is connected; 0: it is heard
	Flows     int          `json:"flows"`              // that it owns
	// Loads are what waits for the least busy member there, by service, in the service's own unit, where members say it.
	Loads map[string]uint32 `json:"loads,omitempty"`
}

// Status reads what the data path does: flows by owner, and counts.
func (f *DataPath) Status() (Status, error) {
	s := Status{}
	owned := map[move.Backend]int{}
	err := f.Flows(func(_ Key, fl Flow) bool {
		s.Flows++
		owned[fl.Owner]++
		if fl.Buffered && fl.Until > kernel.Monotonic() {
			s.Buffered++
		}
		if fl.To != 0 {
			s.Moving++
		}
		return true
	})
	if err != nil {
		return s, err
	}
	for _, n := range slices.Sorted(maps.Keys(owned)) {
		s.Backends = append(s.Backends, BackendStatus{Number: n, Flows: owned[n]})
	}
	s.Counts, err = f.Counts()
	return s, err
}

// Status is the load balancer's, with the backends as this agent sees them.
func (a *Agent) Status() (Status, error) {
	s, err := a.f.Status()
	s.Agent, s.Name, s.Starting, s.Partner = true, a.o.Name, a.starting(), a.pairStatus()
	s.Certificate = a.o.TLS.Certificate()
	owned := map[move.Backend]int{}
	for _, h := range s.Backends {
		owned[h.Number] = h.Flows
	}
	s.Backends = nil
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, number := range slices.Sorted(maps.Keys(a.members)) {
		m := a.members[number]
		v := BackendStatus{Name: m.Name, Number: number, Address: m.Address, Weight: m.Weight, Up: m.up, Connected: a.backends[number] != nil, Flows: owned[number], Loads: a.waitingLoads(number), Unserved: a.unservedAt(m)}
		if c := a.backends[number]; c != nil {
			v.Silent = c.Silence(pingEvery).Seconds()
		}
		delete(owned, number)
		if !m.up {
			v.Reason = m.reason
		}
		switch {
		case m.placed.IsZero():
		case m.location.Tunnel.IsValid():
			v.Where = "tunnel"
		default:
			v.Where = m.location.Device
		}
		s.Backends = append(s.Backends, v)
	}
	for _, number := range slices.Sorted(maps.Keys(owned)) { // of backends that have registered with a life before this one
		s.Backends = append(s.Backends, BackendStatus{Name: a.names[number], Number: number, Flows: owned[number], Connected: a.backends[number] != nil})
	}
	return s, err
}
