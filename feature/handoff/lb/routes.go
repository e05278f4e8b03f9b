// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"net/netip"
	"slices"
	"time"

	"github.com/weir-project/weir/feature/handoff/lb/locate"
)

const (
	routesEvery = time.Second
	routeAgain  = 10 * time.Second // after a failed attempt: rules or another route have precedence
)

// routes is the state of the routes from the services' addresses to the buffer device. Other programs may remove them:
// systemd-networkd does so at its start. A loose reverse path filter then drops the backends' answers.
type routes struct {
	checked time.Time
	put     map[netip.Addr]time.Time // addresses without their route, with the time of the latest attempt to restore it
}

// keepRoutes restores missing routes and logs each once.
func (a *Agent) keepRoutes() {
	r := &a.routes
	if time.Since(r.checked) < routesEvery {
		return
	}
	r.checked = time.Now()
	was := r.put
	r.put = map[netip.Addr]time.Time{}
	for _, to := range a.f.unrouted() {
		at, told := was[to]
		if told && time.Since(at) < routeAgain {
			r.put[to] = at
			continue
		}
		r.put[to] = time.Now()
		if err := a.f.route(to); err != nil && !told {
			a.o.Log.Warn("cannot restore route to service address", "address", to, "err", err)
		} else if !told {
			a.o.Log.Warn("restored missing route to service address", "address", to)
		}
	}
}

// unrouted returns the services' addresses without a route to the buffer device.
func (f *DataPath) unrouted() (out []netip.Addr) {
	f.buffer.mu.Lock()
	for l := range f.buffer.services {
		if a := l.addr.Addr(); !slices.Contains(out, a) {
			out = append(out, a)
		}
	}
	f.buffer.mu.Unlock()
	if err := f.ns.Do(func() error { out = locate.Unrouted(out, f.buffer.Ifindex); return nil }); err != nil {
		return nil
	}
	return out
}
