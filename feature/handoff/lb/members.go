// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/handoff/lb/bpf"
	"github.com/weir-project/weir/feature/handoff/lb/locate"
	"github.com/weir-project/weir/feature/handoff/lb/places"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
)

// Managed is a backend located, checked and weighted by the agent.
type Managed struct {
	Number   move.Backend
	Name     string     // in its agent's certificate
	Address  netip.Addr // of the backend; invalid: it reports its address when it registers
	Weight   int
	Weighted bool     // Weight has precedence over the registered weight; the backend can still take itself out with weight 0
	Services []string // service names; none: all, unless the backend registers for some
	// Check is an address and port. A backend accepting TCP connections there is well. Without a check a backend is well while
	// its agent answers, and always if it never had an agent.
	Check string
	Agent string // host:port of its agent, reported to the other backends
}

// member is a backend's state in the agent.
type member struct {
	Managed
	told     *Managed // from the options; nil: it has registered, or the partner reported it
	location locate.Location
	placed   time.Time // latest successful locate; zero: no known location
	since    time.Time // first locate at this location
	rival    string    // owner of this location, if it is another backend
	proven   bool      // its agent connects from this location
	checked  time.Time // start of the latest locate
	locating bool
	agent    bool         // an agent has connected before
	said     *peer.Conn   // connection of the latest registration; nil: none
	unserved []string     // names of services without a member there, as reported by the backend
	word     *peer.Member // the partner's latest report of it
	check    health
	up       bool
	reason   string // why the backend is not up, or has no location
}

// health is the result of checks.
type health struct {
	running bool
	last    time.Time
	bad     int // consecutive failures
	good    int
}

const (
	checkEvery     = time.Second
	checkTime      = time.Second
	checkFall      = 3 // consecutive failures of a backend before it counts as not well
	checkRise      = 2
	locateInterval = 10 * time.Second // a backend may get another network card
	locateRetry    = time.Second      // after a failure
	pingEvery      = 500 * time.Millisecond
	tendEvery      = 250 * time.Millisecond
	defaultDown    = 3 * time.Second
)

// tend keeps the data path's backends up to date, locates and checks them, and reports changes, until ctx is done.
func (a *Agent) tend(ctx context.Context) {
	var applied []Backend
	var pinged time.Time
	awaited, until := a.mayReturn(a.f.locations().Placed()), time.Now().Add(resumeTimeout)
	if err := a.inherit(awaited); err != nil {
		a.o.Log.Warn("cannot restore health of backends", "err", err)
	}
	news := false // not announced yet
	for range (feature.Loop{Every: tendEvery, Wake: a.kick}).Turns(ctx) {
		if time.Since(pinged) >= pingEvery {
			pinged = time.Now()
			a.pingAll()
		}
		a.keepRoutes()
		a.endStartupIfDue()
		if !a.o.Manage {
			continue
		}
		a.checkMembers()
		backends, p, changed := a.evaluate()
		news = news || changed
		if places.Awaits(backends, awaited) && time.Now().Before(until) {
			continue // the data path has more backends, from an earlier agent: they may be about to register again
		}
		if backends != nil && !slices.EqualFunc(backends, applied, Backend.Equal) {
			if err := a.f.SetBackends(backends); err != nil {
				a.o.Log.Warn("cannot set all backends", "err", err)
			}
			a.pairNews()
			applied = backends // even after an error: the same call would fail again, and a new location is a change
		}
		a.removeBackends()
		if news { // the data path now matches p
			a.announce(p)
			a.pairNews()
			news = false
		}
	}
}

// inherit restores check results of an earlier agent for backends with a location in the data path. Otherwise no backend would be
// well until the first checks, and new flows would go to all, including broken ones.
func (a *Agent) inherit(placed map[move.Backend]bool) (err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for number, m := range a.members {
		if m.Check == "" || !placed[number] {
			continue
		}
		var b bpf.LBLbBackend
		if e := a.f.maps.LbBackends.Lookup(uint32(number), &b); e != nil {
			err = errors.Join(err, fmt.Errorf("backend %s: %w", m.Name, e))
		} else if b.Unwell == 0 {
			m.check.good = checkRise
		}
	}
	return err
}

// resumeTimeout is how long an agent with an earlier agent's data path waits for its backends.
const resumeTimeout = 5 * time.Second

func (a *Agent) pingAll() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, c := range a.backends {
		c.PostPing()
	}
}

// checkMembers starts locating and checking backends in goroutines.
func (a *Agent) checkMembers() {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	for _, m := range a.members {
		every := locateInterval
		if m.placed.IsZero() {
			every = locateRetry
		}
		if m.Address.IsValid() && !m.locating && now.Sub(m.checked) >= every {
			m.locating, m.checked = true, now
			at, said := m.Address, m.said
			a.asides.Go(func() { a.locate(m, at, said) })
		}
		if m.Check != "" && !m.check.running && now.Sub(m.check.last) >= checkEvery {
			m.check.running, m.check.last = true, now
			at := m.Check
			a.asides.Go(func() { a.checkOn(m, at) })
		}
	}
}

func (a *Agent) locate(m *member, at netip.Addr, said *peer.Conn) {
	var p locate.Location
	proven := false
	err := a.f.ns.Do(func() (err error) {
		p, err = locate.Find(at)
		proven = err == nil && said != nil && p.Has(said.Remote())
		return err
	})
	if err == nil && p.Tunnel.IsValid() && a.f.tunnel == 0 {
		err = fmt.Errorf("backend at %s: it is behind a router, and there are no tunnels: set lb.tunnel_mtu", at)
	}
	a.mu.Lock()
	m.locating = false
	if m.Address == at { // otherwise it has registered another address meanwhile
		if err != nil {
			// The known location stays. A backend without an ARP answer for a moment has not moved.
			m.reason = err.Error()
		} else {
			if m.placed.IsZero() || p.Key() != m.location.Key() {
				m.since = time.Now()
			}
			m.location, m.placed, m.reason = p, time.Now(), ""
			m.proven = proven
		}
	}
	a.mu.Unlock()
	a.kicked()
}

func (a *Agent) checkOn(m *member, at string) {
	err := a.f.ns.Do(func() error {
		c, err := net.DialTimeout("tcp", at, checkTime)
		if err == nil {
			c.Close()
		}
		return err
	})
	a.mu.Lock()
	h := &m.check
	h.running = false
	if err != nil {
		h.bad, h.good = h.bad+1, 0
		m.reason = err.Error()
	} else {
		h.bad, h.good = 0, h.good+1
	}
	a.mu.Unlock()
	a.kicked()
}

func (a *Agent) kicked() {
	select {
	case a.kick <- struct{}{}:
	default:
	}
}

// unservedAt returns the services without a member at a backend, as reported by its agent. It returns none if the agent is
// disconnected here and at the partner, because a backend with a check may be well without an agent. The caller holds mu.
func (a *Agent) unservedAt(m *member) []string {
	if a.backends[m.Number] == nil {
		if _, yes := a.byWord(m); !yes {
			return nil
		}
	}
	return m.unserved
}

// found reports whether a backend has a known location to itself.
func (m *member) found() bool { return !m.placed.IsZero() && m.rival == "" }

// contest marks members at the location of another backend. The caller holds mu.
func (a *Agent) contest() {
	var found []locate.Found
	for _, m := range a.members {
		proof := locate.NoProof
		if up, yes := a.byWord(m); m.proven {
			proof = locate.ByOwn
		} else if yes && up && a.backends[m.Number] == nil {
			proof = locate.ByPartner
		}
		if !m.placed.IsZero() {
			found = append(found, locate.Found{Name: m.Name, Number: uint16(m.Number), Named: m.told != nil && m.told.Address.IsValid(), Proof: proof, Since: m.since, At: m.location.Key()})
		}
	}
	rivals := locate.Rivals(found, a.f.locations().Owner)
	for _, m := range a.members {
		rival := rivals[uint16(m.Number)]
		if rival != m.rival && rival != "" {
			a.o.Log.Warn("backend at location of another", "name", m.Name, "address", m.Address, "backend", rival)
		}
		m.rival = rival
	}
}

// evaluate returns the located backends. A backend that must not get new flows has weight 0. The result is nil while no backend
// is located. p is the announcement to the backends. changed reports whether it differs from the previous one.
func (a *Agent) evaluate() (backends []Backend, p peer.Peers, changed bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	up := 0
	a.contest()
	for _, number := range slices.Sorted(maps.Keys(a.members)) {
		m := a.members[number]
		was := m.up
		m.up = a.well(m)
		if m.up != was {
			a.o.Log.Info("backend health changed", "name", m.Name, "up", m.up, "err", m.reason)
		}
		changed = changed || m.up != was
		if !m.found() {
			continue
		}
		if m.up && m.Weight > 0 {
			up++
		}
		backends = append(backends, Backend{Number: number, Name: m.Name, Interface: m.location.Interface, MAC: m.location.MAC, Tunnel: m.location.Tunnel,
			Weight: m.Weight, Services: a.serviceIDs(m.Services), Unserved: a.serviceIDs(a.unservedAt(m))})
	}
	for i, h := range backends {
		if up > 0 && !a.members[h.Number].up { // if all are unwell, the fault may be on this side: a possibly broken backend is better than none
			backends[i].Weight, backends[i].Unwell = 0, true
		}
	}
	changed = changed || a.news
	a.news = false
	return backends, a.peers(), changed
}

func (a *Agent) serviceIDs(names []string) (ids []int) {
	for _, s := range a.o.Services {
		if slices.Contains(names, s.Name) && !slices.Contains(ids, s.ID) {
			ids = append(ids, s.ID)
		}
	}
	return ids
}

func (a *Agent) pairNews() {
	if a.pair != nil {
		a.matchNews()
		wake(a.pair.backends)
	}
}

func (a *Agent) announce(p peer.Peers) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.announced = &p
	for _, c := range a.backends {
		c.Post(p)
	}
}

// tell sends an announcement to a backend, perhaps without some of the other backends.
func (a *Agent) tell(c *peer.Conn, p peer.Peers) {
	err := c.Tell(p)
	if errors.Is(err, peer.ErrTooLong) {
		err = c.Tell(a.fit(p))
	}
	if errors.Is(err, peer.ErrTooLong) { // other errors end the connection
		a.o.Log.Warn("cannot send backend list", "name", c.Peer.Name, "err", err)
	}
}

// peers returns the announcement to the backends. The caller holds mu.
func (a *Agent) peers() (p peer.Peers) {
	for _, number := range slices.Sorted(maps.Keys(a.members)) {
		m := a.members[number]
		p.Members = append(p.Members, peer.Member{Name: m.Name, Number: m.Number, Address: m.Address, Agent: m.Agent, Weight: m.Weight,
			Services: m.Services, Up: m.up})
	}
	p.HearsLeft, p.Idle, p.BufferTimeout = true, a.o.IdleTimeout.Milliseconds(), a.o.BufferTimeout.Milliseconds()
	for _, s := range a.o.Services {
		p.Services = append(p.Services, peer.Service{Name: s.Name, ID: uint16(s.Flows()), Listen: s.Listen, Proto: s.Proto, BySource: s.BySource})
	}
	return p
}
