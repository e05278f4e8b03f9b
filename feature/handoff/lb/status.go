// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"context"
	"maps"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/weir-project/weir/feature/handoff/lb/bpf"
	"github.com/weir-project/weir/feature/handoff/lb/report"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/kernel"
)

// Types of package report.
type (
	Status        = report.Status
	PairStatus    = report.PairStatus
	BackendStatus = report.BackendStatus
	Counts        = report.Counts
	DeviceFault   = report.DeviceFault
)

// Collector implements feature.Measured: the metrics of all load balancers below a root.
func (Feature) Collector(r *kernel.Root) prometheus.Collector {
	return report.Collector{Statuses: func(ctx context.Context) ([]Status, error) { return Statuses(ctx, r) }}
}

// Status returns the number of flows by owner, and the packet counters.
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

// Status is the data path's status, with the backends as seen by this agent.
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
		v := BackendStatus{Name: m.Name, Number: number, Address: m.Address, Weight: m.Weight, Up: m.up, Connected: a.backends[number] != nil, Registered: a.registered(m), Flows: owned[number], Loads: a.loads.Of(number, a.o.Services), Unserved: a.unservedAt(m), UserPorts: report.UsersSend(a.f.maps.LbUsers, number)}
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
	for _, number := range slices.Sorted(maps.Keys(owned)) { // of backends registered with an earlier agent
		o, _ := a.f.names.Owner(number)
		s.Backends = append(s.Backends, BackendStatus{Name: o.Name, Number: number, Flows: owned[number], Connected: a.backends[number] != nil, Reason: a.unknown(number)})
	}
	for _, number := range a.f.names.All() {
		o, _ := a.f.names.Owner(number)
		if _, flows := owned[number]; !flows && a.members[number] == nil && a.backends[number] == nil && !o.Unknown() {
			s.Kept = append(s.Kept, report.KeptNumber{Name: o.Name, Number: number, Free: max(0, a.o.IdleTimeout-a.away(number)).Seconds()})
		}
	}
	return s, err
}

// registered reports whether a backend has registered over its agent's current connection, or is connected at the partner. The
// caller holds mu.
func (a *Agent) registered(m *member) bool {
	if c := a.backends[m.Number]; c != nil {
		return m.said == c
	}
	return a.pair != nil && m.word != nil && m.word.Connected
}

// unknown explains why a flow owner is no member, and what happens to its flows. The caller holds
// mu.
func (a *Agent) unknown(n move.Backend) string {
	var b bpf.LBLbBackend
	err := a.f.maps.LbBackends.Lookup(uint32(n), &b)
	switch {
	case !a.o.Manage:
		return ""
	case err == nil && b.Ifindex == 0 && b.Unwell == bpf.Removed:
		return "lb.backends does not name it; its flows go to other backends at their next packet"
	case a.o.Register:
		return "lb.backends does not name it, and it has not registered"
	case a.pair != nil:
		return "lb.backends does not name it; its flows go to other backends once the partner does not name it either"
	}
	return "lb.backends does not name it; its flows go to other backends in a moment"
}
