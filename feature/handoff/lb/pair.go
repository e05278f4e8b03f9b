// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"maps"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weir-project/weir/feature/handoff/lb/places"
	"github.com/weir-project/weir/feature/handoff/lb/spec"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
)

// Two load balancers with the same backends and weights hash a flow to the same backend. So neither needs the other's flows. Each
// reports its backends and their shares to the other. It reports only flows outside the hash: their owner is not the hash's
// backend at one of the two. They have moved, or are older than the latest change of shares.

const (
	wordTime = 3 * time.Second // for the partner's first report; a partner of an older version then gets all flows
	// wordFor is how long a disconnected partner's report of its backends stays valid, if some agents have connected here and
	// others have not.
	wordFor     = 10 * time.Second
	carriesFor  = 3 * time.Second // since the latest packets of clients
	newsOfAll   = 1               // values of lb_config.news
	newsOfMoved = 2
)

// pairing is the state of the exchange with the partner. mu guards the fields below it.
type pairing struct {
	wake, backends, compare chan struct{} // signals: flows have changed; backends have changed; the partner's shares have changed

	told, heard  atomic.Uint64 // counts of records
	splitTime    atomic.Int64  // ns, see PairStatus
	splitDropped atomic.Uint64
	carriesSince atomic.Int64 // UnixNano of the latest packets of clients

	mu    sync.Mutex
	keys  map[Key]bool            // changed flows, not reported yet
	said  map[Key]bool            // flows reported to or by the partner: it may have another owner for them
	conn  *peer.Conn              // the partner's connection to this agent
	lost  time.Time               // end of the latest connection
	word  *peer.Pair              // the partner's latest report
	names map[move.Backend]string // the partner's backends; nil: not reported
	fresh bool                    // word arrived by the current connection
	rings map[int][]uint16        // the partner's ring of each service; nil: unknown
	own   map[int][]uint16        // the rings here
	all   bool                    // the partner's shares are unknown, and it gets all flows
}

func newPairing() *pairing {
	return &pairing{keys: map[Key]bool{}, said: map[Key]bool{}, wake: make(chan struct{}, 1), backends: make(chan struct{}, 1), compare: make(chan struct{}, 1)}
}

// assume selects reporting all flows if the partner's shares are unknown. It reports whether they are.
func (d *pairing) assume() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.all = d.rings == nil
	return d.all
}

// knows reports whether the flows for the partner can be selected.
func (d *pairing) knows() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.all || d.rings != nil
}

// elsewhere reports whether the hash of a flow leads to another backend than its owner, here or at the partner. It is true for an
// unknown ring. The caller holds mu.
func (d *pairing) elsewhere(k Key, owner move.Backend) bool {
	r, own := d.rings[spec.ServiceNumber(k.Service)], d.own[spec.ServiceNumber(k.Service)]
	return r == nil || own == nil || r[k.Bucket()] != uint16(owner) || own[k.Bucket()] != uint16(owner)
}

// elsewhereThere reports whether the partner's hash of a flow leads to another backend than its owner. It is false for an unknown ring.
func (d *pairing) elsewhereThere(k Key, owner move.Backend) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.rings[spec.ServiceNumber(k.Service)]
	return r != nil && r[k.Bucket()] != uint16(owner)
}

// knownThere notes the partner's report of a flow. later: this load balancer knows a later epoch, and reports it back.
func (d *pairing) knownThere(k Key, gone, later bool) {
	d.mu.Lock()
	if gone {
		delete(d.said, k)
	} else {
		d.said[k] = true
	}
	d.mu.Unlock()
	if later {
		d.mark(k)
	}
}

// knownBoth reports whether the partner knows a flow too, and must learn of later epochs.
func (d *pairing) knownBoth(k Key) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.said[k]
}

// wants reports whether the partner needs a flow.
func (d *pairing) wants(k Key, fl Flow) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.said[k] || fl.To != 0 || d.elsewhere(k, fl.Owner)
}

// tells is wants for a flow about to be reported, and notes the report. A reported flow is reported again as long as it lives.
func (d *pairing) tells(k Key, fl Flow, gone bool) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case gone:
		was := d.said[k] || d.rings == nil
		delete(d.said, k)
		return was
	case d.said[k], fl.To != 0, d.elsewhere(k, fl.Owner):
		d.said[k] = true
		return true
	}
	return false
}

// forget drops the notes of flows unknown here.
func (d *pairing) forget(here map[Key]bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	maps.DeleteFunc(d.said, func(k Key, _ bool) bool { return !here[k] && !d.keys[k] })
}

func (d *pairing) hears(c *peer.Conn, yes bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case yes:
		d.conn, d.fresh = c, false
	case d.conn == c:
		d.conn, d.fresh, d.lost = nil, false, time.Now()
	}
}

// nameThere returns the name of a number at the partner, "" for none.
func (d *pairing) nameThere(number move.Backend) string {
	if d == nil {
		return ""
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if name := d.names[number]; name != "" || d.word == nil {
		return name
	}
	return d.word.Kept[number]
}

// isHeard reports whether the partner is connected and has reported its backends. It is true without a partner.
func (d *pairing) isHeard() bool {
	if d == nil {
		return true
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.fresh
}

func (a *Agent) pairWord() peer.Peers {
	a.f.mu.Lock()
	backends := slices.Clone(a.f.backends)
	a.f.mu.Unlock()
	a.mu.Lock()
	defer a.mu.Unlock()
	p := a.peers()
	for i, m := range p.Members {
		p.Members[i].Connected, p.Members[i].Unserved = a.backends[m.Number] != nil, a.unservedAt(a.members[m.Number])
	}
	p.Pair = &peer.Pair{Ring: shares(backends), Agents: len(a.backends), Starting: a.startup != nil, Carries: a.pair.carries(), Kept: map[move.Backend]string{}, Young: map[move.Backend]int64{}}
	for _, number := range a.f.names.All() {
		if o, _ := a.f.names.Owner(number); a.members[number] == nil && !o.Loose && !o.Unknown() {
			p.Pair.Kept[number] = o.Name
		}
	}
	for number, since := range a.young {
		p.Pair.Young[number] = time.Since(since).Milliseconds()
	}
	return p
}

func shares(backends []Backend) (out []peer.Share) {
	for _, h := range backends {
		out = append(out, peer.Share{Number: h.Number, Name: h.Name, Weight: h.Weight, Services: h.Services, Unserved: h.Unserved})
	}
	return out
}

// partnerSaid processes the partner's report of its backends and shares.
func (a *Agent) partnerSaid(p peer.Peers) {
	if p.Pair == nil {
		return
	}
	d := a.pair
	d.mu.Lock()
	d.names = map[move.Backend]string{}
	for _, m := range p.Members {
		d.names[m.Number] = m.Name
	}
	same := d.word != nil && reflect.DeepEqual(d.word.Ring, p.Pair.Ring)
	d.word, d.fresh = p.Pair, d.conn != nil
	d.mu.Unlock()
	a.mu.Lock()
	if err := a.yield(p.Pair); err != nil {
		a.o.Log.Warn("cannot give numbers to their owners at the partner", "err", err)
	}
	a.mu.Unlock()
	a.adoptMembers(p.Members)
	a.f.mu.Lock()
	own := len(a.f.backends)
	a.f.mu.Unlock()
	d.mu.Lock()
	// A partner that has just started locates its backends one by one. Its rings are incomplete until then, and almost all flows
	// would be reported by each of them.
	if !same && len(p.Pair.Ring) > 0 && (d.rings != nil || d.all || len(p.Pair.Ring) >= own) {
		d.rings = a.f.newRings(p.Pair.Ring)
	}
	d.mu.Unlock()
	a.matchNews()
	if !same {
		wake(d.compare)
	}
	a.kicked()
}

func (f *DataPath) newRings(shares []peer.Share) map[int][]uint16 {
	var backends []Backend
	for _, s := range shares {
		backends = append(backends, Backend{Number: s.Number, Name: s.Name, Weight: s.Weight, Services: s.Services, Unserved: s.Unserved})
	}
	rings := map[int][]uint16{}
	for _, id := range f.serviceIDs() {
		rings[id] = places.Ring(backends, id)
	}
	return rings
}

// matchNews selects the learned flows that the data path reports. These are all flows, or only flows outside the hash if both
// load balancers have the same shares.
func (a *Agent) matchNews() {
	a.f.mu.Lock()
	own := shares(a.f.backends)
	a.f.mu.Unlock()
	rings := a.f.newRings(own)
	a.pair.mu.Lock()
	a.pair.own = rings
	news := uint32(newsOfAll)
	if w := a.pair.word; w != nil && len(own) > 0 && reflect.DeepEqual(w.Ring, own) {
		news = newsOfMoved
	}
	a.pair.mu.Unlock()
	if was := a.f.news.Swap(news); was != news {
		if err := a.f.configure(); err != nil {
			a.o.Log.Warn("cannot select flows for partner", "err", err)
		}
		wake(a.pair.compare) // compare: flows were learned meanwhile
	}
}

// adoptMembers adds and updates backends with agents at the partner. This load balancer then spreads new flows like its partner,
// and keeps these backends if the partner dies.
func (a *Agent) adoptMembers(members []peer.Member) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.o.Manage {
		return
	}
	listed := map[move.Backend]bool{}
	for _, w := range members {
		listed[w.Number] = true
	}
	for number, m := range a.members {
		if m.word != nil && !listed[number] { // forgotten there
			w := *m.word
			w.Connected, m.word = false, &w
		}
	}
	for _, w := range members {
		w.Address = w.Address.Unmap()
		if said := (peer.Registration{Address: w.Address, Agent: w.Agent, Services: w.Services, Unserved: w.Unserved}); said.Check() != nil {
			continue
		}
		m := a.members[w.Number]
		if m == nil {
			taken := slices.ContainsFunc(slices.Collect(maps.Values(a.members)), func(o *member) bool { return o.Name == w.Name || o.Address == w.Address })
			if !a.o.Register || taken || !w.Connected && a.forgotten[w.Number] == w.Name || !w.Address.IsValid() || w.Number == 0 || w.Number > MaxBackends || a.adoptName(w) != nil {
				continue
			}
			m = &member{Managed: Managed{Number: w.Number, Name: w.Name}}
			a.members[w.Number] = m
			a.news = true
		}
		if m.Name != w.Name {
			continue // the two configurations differ: weir lb status shows both
		}
		m.word = &w
		if a.backends[w.Number] != nil || !w.Connected {
			continue
		}
		if m.told == nil && m.Address != w.Address {
			m.Address, m.placed, m.checked, m.rival = w.Address, time.Time{}, time.Time{}, ""
		}
		m.Weight, m.unserved = w.Weight, w.Unserved
		if m.told == nil {
			m.Services = w.Services
		}
		if w.Agent != "" {
			m.Agent = w.Agent
		}
	}
}

// byWord returns the partner's judgement of a backend without an agent here. yes is false if there is none. The caller holds mu.
func (a *Agent) byWord(m *member) (up, yes bool) {
	if a.pair == nil || m.word == nil || !m.word.Connected {
		return false, false
	}
	a.pair.mu.Lock()
	defer a.pair.mu.Unlock()
	if a.pair.conn == nil && len(a.backends) > 0 && time.Since(a.pair.lost) > wordFor {
		return false, false // other agents have connected here, and this one has not
	}
	return m.word.Up, true
}

// partnerToldAll ends the startup after the partner's complete report.
func (a *Agent) partnerToldAll() {
	a.pair.mu.Lock()
	w := a.pair.word
	a.pair.mu.Unlock()
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.startup != nil && w != nil && w.Agents > 0 && !w.Starting {
		a.startup.byPartner = true
		a.kicked()
	}
}

// carries reports whether clients' packets pass this load balancer.
func (d *pairing) carries() bool {
	return time.Since(time.Unix(0, d.carriesSince.Load())) < carriesFor
}
