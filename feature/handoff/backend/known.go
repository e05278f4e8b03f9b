// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/feature/handoff/repair"
	"github.com/weir-project/weir/feature/handoff/wire"
)

// known is the agent's knowledge of other agents and services. It is immutable: a change replaces it.
type known struct {
	services map[string][]Service             // addresses, by name
	home     map[string]*keeperClient         // ways for arriving sessions, by service
	away     map[move.Backend][]*keeperClient // ways to other backends, by backend, one per service
	links    map[move.Backend]*link           // connections to the other backends
}

// learn replaces the known backends and services.
func (a *Agent) learn(peers []Remote, services []Service) {
	a.learning.Lock()
	defer a.learning.Unlock()
	was := a.known.Load()
	now := &known{services: map[string][]Service{}, home: map[string]*keeperClient{}, away: map[move.Backend][]*keeperClient{}, links: map[move.Backend]*link{}}
	for _, s := range services {
		now.services[s.Name] = append(now.services[s.Name], s)
		if now.home[s.Name] != nil {
			continue // another address of the same service
		}
		// The keeper knows a service by name: its member stays when addresses change.
		if now.home[s.Name] = was.home[s.Name]; was.home[s.Name] == nil {
			now.home[s.Name] = a.newHome(s.Name)
		}
	}
	for _, r := range peers {
		k := was.links[r.Number]
		same := k != nil && k.to == r
		if !same {
			k = &link{a: a, to: r, hello: func() peer.Hello { return a.own }, hear: func(_ *peer.Conn, f peer.Frame) { a.toSource(nil, f) }, load: a.loadThere, changed: a.linkChanged}
		}
		now.links[r.Number] = k
		for _, s := range slices.Sorted(maps.Keys(now.services)) {
			i := slices.IndexFunc(was.away[r.Number], func(p *keeperClient) bool { return p.service == s })
			if same && i >= 0 {
				now.away[r.Number] = append(now.away[r.Number], was.away[r.Number][i])
				continue
			}
			now.away[r.Number] = append(now.away[r.Number], a.newWay(s, r))
		}
	}
	a.known.Store(now)
	a.replace(was, now)
}

func (a *Agent) newHome(s string) *keeperClient {
	p := &keeperClient{a: a, service: s, name: "@" + a.o.Name, give: a.resumeArrival, calls: map[uint32]func(error){}, ready: true}
	// Balances: it receives the loads of this backend's members, and reports them to other backends. Resumes: it
	// continues sessions of a way that stays closed.
	p.caps = wire.Balances | wire.Resumes
	p.members.Store(unknown)
	return p
}

func (a *Agent) newWay(s string, r Remote) *keeperClient {
	return &keeperClient{a: a, service: s, name: "@" + r.Name, calls: map[uint32]func(error){},
		give: func(p *keeperClient, m wire.Message, fd int) { a.startSend(p, r.Number, m, fd) }}
}

// replace starts new connections and members, and ends removed ones.
func (a *Agent) replace(was, now *known) {
	for p := range was.keepers() {
		if !now.has(p) && p.stop != nil {
			a.wg.Go(func() { a.retire(p) })
		}
	}
	for n, k := range was.links {
		if now.links[n] != k && k.stop != nil {
			k.stop()
		}
	}
	for p := range now.keepers() {
		if !was.has(p) {
			p.stop = a.spawn(p.run)
		}
	}
	for n, k := range now.links {
		if was.links[n] != k {
			k.stop = a.spawn(k.run)
		}
	}
	for _, k := range now.links {
		a.linkChanged(k)
	}
}

// keepers calls yield with every keeperClient.
func (k *known) keepers() func(yield func(*keeperClient) bool) {
	return func(yield func(*keeperClient) bool) {
		for _, p := range k.home {
			if !yield(p) {
				return
			}
		}
		for _, ways := range k.away {
			for _, p := range ways {
				if !yield(p) {
					return
				}
			}
		}
	}
}

// kept reports whether a keeper is connected for every service.
func (k *known) kept() bool {
	for p := range k.keepers() {
		if p.maxBytes() == 0 {
			return false
		}
	}
	return true
}

func (k *known) has(p *keeperClient) bool {
	for q := range k.keepers() {
		if p == q {
			return true
		}
	}
	return false
}

// told processes the load balancer's list of backends and services.
func (a *Agent) told(p peer.Peers) {
	a.mu.Lock()
	news := p.Rejected != a.unwanted
	a.unwanted, a.members, a.balanced = p.Rejected, p.Members, p.Services
	for _, m := range p.Members {
		if m.Number == a.o.Number {
			a.share = m.Weight
		}
	}
	a.mu.Unlock()
	a.lbHearsLeft.Store(p.HearsLeft)
	a.setBufferTime(p.BufferTimeout)
	if p.Rejected != "" {
		if news {
			a.o.Log.Error("load balancer rejects this backend", "err", p.Rejected)
		}
		if len(p.Services) == 0 {
			return // it may reject the connection too; otherwise a list of backends follows
		}
	}
	var peers []Remote
	for _, m := range p.Members {
		if m.Number != a.o.Number && m.Agent != "" {
			peers = append(peers, Remote{Name: m.Name, Number: m.Number, Address: m.Agent})
		}
	}
	var services []Service
	for _, s := range p.Services {
		wanted := len(a.o.Serve) == 0 || slices.Contains(a.o.Serve, s.Name)
		if wanted && s.Name != "" && s.Proto == unix.IPPROTO_TCP && !s.BySource {
			services = append(services, Service{Name: s.Name, ID: s.ID, Listen: s.Listen})
		}
	}
	a.o.Log.Info("backends and services received", "backends", len(peers), "services", len(services))
	a.learn(peers, services)
	a.toldServices(p)
}

// serviceAt returns the service at an address.
func (k *known) serviceAt(local netip.AddrPort) (Service, bool) {
	for _, all := range k.services {
		for _, s := range all {
			if s.Listen.Port() == local.Port() && s.Listen.Addr().Unmap() == local.Addr().Unmap() {
				return s, true
			}
		}
	}
	return Service{}, false
}

// findService returns the service address of a flow. A flow without a tag belongs to the only address of the client's
// family.
func (k *known) findService(id peer.Flow) (Service, bool) {
	for _, all := range k.services {
		for _, s := range all {
			if s.ID == id.Service && s.Listen.Addr().Unmap().Is4() == id.Client.Addr().Unmap().Is4() {
				return s, true
			}
		}
	}
	return Service{}, false
}

// flowID returns the load balancer's name of a session. For a removed address it uses the service's number, which the
// load balancer may still know.
func (k *known) flowID(service string, local, remote netip.AddrPort) peer.Flow {
	s, ok := k.serviceAt(local)
	if !ok || s.Name != service {
		return peer.Flow{Service: k.number(service), Client: remote}
	}
	return peer.Flow{Service: s.ID, Client: remote}
}

// number returns the number of a service, for messages about all of its addresses.
func (k *known) number(service string) uint16 {
	for _, s := range k.services[service] {
		return peer.ServiceNumber(s.ID)
	}
	return 0
}

// addresses lists a service's addresses for messages.
func (k *known) addresses(service string) string {
	var out []string
	for _, s := range k.services[service] {
		out = append(out, s.Listen.String())
	}
	return strings.Join(out, ", ")
}

// findFlow returns the kernel's addresses of a session, and the keeperClient for its arrival. The latter is nil if
// this backend does not have the service. Both come from one snapshot, because the service may be removed
// concurrently.
func (k *known) findFlow(id peer.Flow) (repair.Flow, *keeperClient) {
	s, ok := k.findService(id)
	if !ok {
		return repair.Flow{}, nil
	}
	return repair.Flow{Local: netip.AddrPortFrom(s.Listen.Addr().Unmap(), s.Listen.Port()), Remote: id.Client}, k.home[s.Name]
}

func (a *Agent) backendName(h move.Backend) string {
	if k := a.known.Load().links[h]; k != nil {
		return k.to.Name
	}
	return fmt.Sprintf("backend %d", h)
}

// sortedLinks returns the links to the other backends, by name.
func (a *Agent) sortedLinks() []*link {
	return slices.SortedFunc(maps.Values(a.known.Load().links), func(x, y *link) int {
		if x.to.Name < y.to.Name {
			return -1
		}
		return 1
	})
}

// spawn runs f until the agent ends, or until stop is called.
func (a *Agent) spawn(f func(context.Context)) (stop func()) {
	ctx, cancel := context.WithCancel(a.ctx)
	a.wg.Go(func() { f(ctx) })
	return cancel
}
