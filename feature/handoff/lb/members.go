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
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
)

// Managed is a backend that the agent places and weighs itself.
type Managed struct {
	Number   move.Backend
	Name     string     // in its agent's certificate
	Address  netip.Addr // of the backend; not valid: it says so when it registers
	Weight   int
	Weighted bool     // Weight goes, whatever the backend registers with: it may only take itself out, with 0
	Services []string // names of those it serves; none: all, unless it says which when it registers
	// Check is where the backend takes TCP connections while it is well. "" for none: a backend is well then while its agent answers,
	// and one that never had an agent always is.
	Check string
	Agent string // host:port of its agent, for the others
}

// member is a backend as the agent knows it now.
type member struct {
	Managed
	told     *Managed // by the options; nil: it has registered
	location locate.Location
	placed   time.Time // when place was found; zero: it is not known where the backend is
	since    time.Time // when it was found there first
	rival    string    // the backend that is there; "": it is this one
	checked  time.Time // for it, the last time
	locating bool
	agent    bool         // it has had one
	said     *peer.Conn   // by which it has registered last; nil: it has not
	unserved []string     // names of services that nobody serves there now, as it says
	word     *peer.Member // what the partner says of it
	check    health
	up       bool
	reason   string // it is not up, or not where it should be
}

// health is what checks have found.
type health struct {
	running bool
	last    time.Time
	bad     int // in a row
	good    int
}

const (
	checkEvery     = time.Second
	checkTime      = time.Second
	checkFall      = 3 // checks in a row that fail have a backend be ill
	checkRise      = 2
	locateInterval = 10 * time.Second // a backend may get another network card
	locateRetry    = time.Second      // where it was not found
	pingEvery      = 500 * time.Millisecond
	tendEvery      = 250 * time.Millisecond
	defaultDown    = 3 * time.Second
)

// tend keeps the data path's backends what they are: where they are, and whether they are well.
func (a *Agent) tend(ctx context.Context) {
	var applied []Backend
	var pinged time.Time
	awaited, until := a.mayReturn(a.f.placed()), time.Now().Add(resumeTimeout)
	if err := a.inherit(awaited); err != nil {
		a.o.Log.Warn("it is not known which backends were well", "err", err)
	}
	news := false // that nobody was told yet
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
		if awaits(backends, awaited) && time.Now().Before(until) {
			continue // the data path knows more backends, from an earlier life: they may be about to register again
		}
		if backends != nil && !slices.EqualFunc(backends, applied, sameBackend) {
			if err := a.f.SetBackends(backends); err != nil {
				a.o.Log.Warn("not every backend can be set", "err", err)
			}
			a.pairNews()
			applied = backends // the same again would fail again: a backend that is found elsewhere is another one
		}
		a.removeBackends()
		if news { // what p says the data path does by now
			a.announce(p)
			a.pairNews()
			news = false
		}
	}
}

// inherit goes on with what an earlier life's checks have found of the backends that the data path can reach. Else nobody would be
// well until they have been made again, and so as if all were: those that are ill would get new flows.
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

// resumeTimeout is how long an agent that goes on with an earlier one's data path waits for the backends that are there.
const resumeTimeout = 5 * time.Second

// placed are the backends that the data path can reach.
func (f *DataPath) placed() map[move.Backend]bool {
	out := f.tunnelled()
	var number uint32
	var k bpf.LBLbMacKey
	for it := f.maps.LbMacs.Iterate(); it.Next(&k, &number); {
		out[move.Backend(number)] = true
	}
	return out
}

// tunnelled are the backends at the ends of tunnels.
func (f *DataPath) tunnelled() map[move.Backend]bool {
	out := map[move.Backend]bool{}
	var number uint32
	var t bpf.LBLbTunnelKey
	for it := f.maps.LbTunnels.Iterate(); it.Next(&t, &number); {
		out[move.Backend(number)] = true
	}
	return out
}

func awaits(have []Backend, want map[move.Backend]bool) bool {
	missing := len(want)
	for _, h := range have {
		if want[h.Number] {
			missing--
		}
	}
	return missing > 0
}

func sameBackend(a, b Backend) bool {
	return a.Number == b.Number && a.Name == b.Name && a.Interface == b.Interface && a.MAC.String() == b.MAC.String() && a.Weight == b.Weight &&
		a.Tunnel == b.Tunnel && slices.Equal(a.Services, b.Services) && slices.Equal(a.Unserved, b.Unserved) && a.Unwell == b.Unwell
}

func (a *Agent) conns() []*peer.Conn {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Collect(maps.Values(a.backends))
}

func (a *Agent) pingAll() {
	for _, c := range a.conns() {
		_ = c.Ping() // one that fails is closed
	}
}

// checkMembers starts what takes time: finding backends, and checking them.
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
			at := m.Address
			a.asides.Go(func() { a.locate(m, at) })
		}
		if m.Check != "" && !m.check.running && now.Sub(m.check.last) >= checkEvery {
			m.check.running, m.check.last = true, now
			at := m.Check
			a.asides.Go(func() { a.checkOn(m, at) })
		}
	}
}

func (a *Agent) locate(m *member, at netip.Addr) {
	var p locate.Location
	err := a.f.ns.Do(func() (err error) { p, err = locate.Find(at); return err })
	if err == nil && p.Tunnel.IsValid() && a.f.tunnel == 0 {
		err = fmt.Errorf("backend at %s: routers are before it, and there are no tunnels: set tunnel_mtu", at)
	}
	a.mu.Lock()
	m.locating = false
	if m.Address == at { // else it has registered anew meanwhile
		if err != nil {
			// What was known stays: a backend that answers no ARP for a moment has not moved.
			m.reason = err.Error()
		} else {
			if m.placed.IsZero() || p.Key() != m.location.Key() {
				m.since = time.Now()
			}
			m.location, m.placed, m.reason = p, time.Now(), ""
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

// unservedAt are services that nobody serves at a backend, as its agent says. What an agent that has gone said counts no more: a backend
// with a check may be well without one. The caller holds mu.
func (a *Agent) unservedAt(m *member) []string {
	if a.backends[m.Number] == nil {
		if _, yes := a.byWord(m); !yes {
			return nil
		}
	}
	return m.unserved
}

// found says whether it is known where a backend is, and no other one is there.
func (m *member) found() bool { return !m.placed.IsZero() && m.rival == "" }

// contest notes which members are where others are. The caller holds mu.
func (a *Agent) contest() {
	var found []locate.Found
	for _, m := range a.members {
		if !m.placed.IsZero() {
			found = append(found, locate.Found{Name: m.Name, Number: uint16(m.Number), Named: m.told != nil && m.told.Address.IsValid(), Since: m.since, At: m.location.Key()})
		}
	}
	rivals := locate.Rivals(found, a.f.ownerOf)
	for _, m := range a.members {
		rival := rivals[uint16(m.Number)]
		if rival != m.rival && rival != "" {
			a.o.Log.Warn("a backend is where another one is", "name", m.Name, "address", m.Address, "backend", rival)
		}
		m.rival = rival
	}
}

// evaluate says which backends there are, with weight 0 those that are not to get new flows; nil as long as no backend's place is known.
// p is what the others are told of them; changed: what they were told is not so any more.
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
			a.o.Log.Info("backend", "name", m.Name, "up", m.up, "reason", m.reason)
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
		if up > 0 && !a.members[h.Number].up { // where all are ill it may be us: better a backend that is perhaps well than none
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

// pairNews has the partner told of the backends.
func (a *Agent) pairNews() {
	if a.pair != nil {
		a.matchNews()
		wake(a.pair.backends)
	}
}

// announce tells all backends of each other.
func (a *Agent) announce(p peer.Peers) {
	p = a.fit(p)
	for _, c := range a.conns() {
		if err := c.Tell(p); errors.Is(err, peer.ErrTooLong) { // any other ends the connection
			a.o.Log.Warn("a backend is told nothing of the others", "name", c.Peer.Name, "err", err)
		}
	}
}

// peers is what backends are told. The caller holds mu.
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
