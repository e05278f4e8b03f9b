// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"maps"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weir-project/weir/feature/handoff/lb/spec"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
)

// Two load balancers with the same backends find the same backend for a flow, so neither has to know what the other one knows. Each tells
// the other its backends and their shares, and of flows only those whose owner is not the hash's at both: they have moved, or began
// before the shares changed.

const (
	wordTime = 3 * time.Second // for the partner to say its shares; one of an older weir is told of all flows
	// wordFor is for how long after its end a partner is believed about backends whose agents have not come here, while others have.
	wordFor     = 10 * time.Second
	carriesFor  = 3 * time.Second // since the latest packets of clients
	newsOfAll   = 1               // lb_config.news
	newsOfMoved = 2
)

// pairing is what is known of the partner, and what it is yet to be told.
type pairing struct {
	wake, backends, compare chan struct{} // flows have changed; backends have; the partner's shares have

	told, heard  atomic.Uint64 // records
	splitTime    atomic.Int64  // see PairStatus
	splitDropped atomic.Uint64
	carriesSince atomic.Int64 // when packets of clients came by last, UnixNano

	mu    sync.Mutex
	keys  map[Key]bool          // flows that have changed
	said  map[Key]bool          // flows that the partner has been told of, or has told of: it may know an owner of its own
	conn  *peer.Conn            // the partner's
	lost  time.Time             // it went
	word  *peer.Pair            // the latest
	names map[move.Backend]bool // the backends that it knows; nil: it has not said
	rings map[int][]uint16      // by it, of each service; nil: it is not known
	own   map[int][]uint16      // by the shares here
	all   bool                  // its shares are not known, and it is told of everything
}

func newPairing() *pairing {
	return &pairing{keys: map[Key]bool{}, said: map[Key]bool{}, wake: make(chan struct{}, 1), backends: make(chan struct{}, 1), compare: make(chan struct{}, 1)}
}

// assume has the partner be told of everything, if its shares are not known.
func (d *pairing) assume() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.all = d.rings == nil
	return d.all
}

// knows says whether it is known what to tell.
func (d *pairing) knows() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.all || d.rings != nil
}

// elsewhere says whether the hash leads a flow to another backend than its owner, at the partner or here. The caller holds mu.
func (d *pairing) elsewhere(k Key, owner move.Backend) bool {
	r, own := d.rings[spec.ServiceNumber(k.Service)], d.own[spec.ServiceNumber(k.Service)]
	return r == nil || own == nil || r[k.Bucket()] != uint16(owner) || own[k.Bucket()] != uint16(owner)
}

// elsewhereThere says whether the partner's hash leads a flow to another backend than its owner, as far as that is known.
func (d *pairing) elsewhereThere(k Key, owner move.Backend) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.rings[spec.ServiceNumber(k.Service)]
	return r != nil && r[k.Bucket()] != uint16(owner)
}

// knownThere notes that the partner has told of a flow. later: here it is known in a later epoch, which the partner is told.
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

// knownBoth says whether the partner knows a flow, too: it is to hear of a later epoch.
func (d *pairing) knownBoth(k Key) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.said[k]
}

// wants says whether the partner is to know a flow.
func (d *pairing) wants(k Key, fl Flow) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.said[k] || fl.To != 0 || d.elsewhere(k, fl.Owner)
}

// tells does so for one that is told of now, and notes it. One that the partner has been told of is told of as long as it lives.
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

// forget forgets flows that are not known here any more.
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
		d.conn = c
	case d.conn == c:
		d.conn, d.lost = nil, time.Now()
	}
}

// pairWord is what the partner is told of this load balancer.
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
	p.Pair = &peer.Pair{Ring: shares(backends), Agents: len(a.backends), Starting: a.startup != nil, Carries: a.pair.carries()}
	return p
}

func shares(backends []Backend) (out []peer.Share) {
	for _, h := range backends {
		out = append(out, peer.Share{Number: h.Number, Name: h.Name, Weight: h.Weight, Services: h.Services, Unserved: h.Unserved})
	}
	return out
}

// partnerSaid takes the partner's backends and shares.
func (a *Agent) partnerSaid(p peer.Peers) {
	if p.Pair == nil {
		return
	}
	a.adoptMembers(p.Members)
	a.f.mu.Lock()
	own := len(a.f.backends)
	a.f.mu.Unlock()
	d := a.pair
	d.mu.Lock()
	same := d.word != nil && reflect.DeepEqual(d.word.Ring, p.Pair.Ring)
	d.word = p.Pair
	d.names = map[move.Backend]bool{}
	for _, m := range p.Members {
		d.names[m.Number] = true
	}
	// One that has just begun finds its backends one after the other: by each of these shares almost all flows would be told.
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

// newRings are the rings of all services.
func (f *DataPath) newRings(shares []peer.Share) map[int][]uint16 {
	var backends []Backend
	for _, s := range shares {
		backends = append(backends, Backend{Number: s.Number, Name: s.Name, Weight: s.Weight, Services: s.Services, Unserved: s.Unserved})
	}
	rings := map[int][]uint16{}
	for _, id := range f.serviceIDs() {
		rings[id] = newRing(backends, id)
	}
	return rings
}

// matchNews has the data path tell of all flows that are learned, or where both load balancers have the same shares of those alone
// that the hash does not find.
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
			a.o.Log.Warn("the data path tells of too many flows, or too few", "err", err)
		}
		wake(a.pair.compare) // of what was learned meanwhile
	}
}

// adoptMembers takes backends whose agents are at the partner: this load balancer spreads new flows as that one does, and goes on with
// them if the partner ends.
func (a *Agent) adoptMembers(members []peer.Member) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.o.Manage {
		return
	}
	for _, w := range members {
		w.Address = w.Address.Unmap()
		if said := (peer.Registration{Address: w.Address, Agent: w.Agent, Services: w.Services, Unserved: w.Unserved}); said.Check() != nil {
			continue
		}
		m := a.members[w.Number]
		if m == nil {
			taken := slices.ContainsFunc(slices.Collect(maps.Values(a.members)), func(o *member) bool { return o.Name == w.Name || o.Address == w.Address })
			if !a.o.Register || taken || !w.Connected && a.forgotten[w.Number] == w.Name || !w.Address.IsValid() || w.Number == 0 || w.Number > MaxBackends {
				continue
			}
			m = &member{Managed: Managed{Number: w.Number, Name: w.Name}}
			a.members[w.Number] = m
			a.news = true
		}
		if m.Name != w.Name {
			continue // the sections of the two differ: status shows both
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

// byWord says whether a backend without an agent here is judged by the partner's word, and what that is. The caller holds mu.
func (a *Agent) byWord(m *member) (up, yes bool) {
	if a.pair == nil || m.word == nil || !m.word.Connected {
		return false, false
	}
	a.pair.mu.Lock()
	defer a.pair.mu.Unlock()
	if a.pair.conn == nil && len(a.backends) > 0 && time.Since(a.pair.lost) > wordFor {
		return false, false // the others' agents are here, and this one's does not come
	}
	return m.word.Up, true
}

// partnerToldAll: what the partner knows is known here, too.
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

// carries says whether clients' packets come by here.
func (d *pairing) carries() bool {
	return time.Since(time.Unix(0, d.carriesSince.Load())) < carriesFor
}
