// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/kernel"
)

// A load balancer that begins anew knows no flow, and the hash alone does not find those that have moved, or that began before the
// backends or their weights changed. Each backend's agent tells of its sessions when it connects, and again while they are known. Until all
// have done so, or for Options.Settle, the data path lets packets of unknown connections wait.

const (
	defaultStartupTimeout = 5 * time.Second
	// minStartupTimeout is for backends that register and that no file names: their agents try to connect once a second.
	minStartupTimeout = 2 * time.Second
)

// startup is what backends have said so far. It ends once, with decideOwners.
type startup struct {
	began time.Time
	until uint64 // CLOCK_MONOTONIC, ns
	told  map[move.Backend]bool
	// byPartner: the other load balancer knows, and has told.
	byPartner bool
	ages      map[Key]time.Duration // of flows that a backend has said are its own
	claims    map[move.Backend]int  // how many of open are whose
	open      []claim               // nobody can tell yet whose they are
}

// claim is what a backend says of a session that was about to move, or that has come and not spoken.
type claim struct {
	backend move.Backend
	key     Key
	r       peer.FlowRecord
}

// beginStartup has the agent wait for backends as long as the data path does.
func (a *Agent) beginStartup() {
	if until := a.f.startupUntil.Load(); until > kernel.Monotonic() {
		a.startup = &startup{began: time.Now(), until: until, told: map[move.Backend]bool{}, claims: map[move.Backend]int{}, ages: map[Key]time.Duration{}}
	}
}

// hearOwned takes what a backend says of its sessions.
func (a *Agent) hearOwned(c *peer.Conn, records []peer.FlowRecord, last bool) {
	var errs []error
	for _, r := range records {
		if err := a.owned(c, r); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", r.Flow, err))
		}
	}
	if len(errs) > 0 {
		a.o.Log.Warn("a session of a backend", "backend", c.Peer.Name, "sessions", len(errs), "err", errs[0])
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if s := a.startup; last && s != nil && a.backends[c.Peer.Number] == c {
		s.told[c.Peer.Number] = true
		a.kicked()
	}
}

func (a *Agent) owned(c *peer.Conn, r peer.FlowRecord) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	backend := c.Peer.Number
	if a.ended || a.backends[backend] != c {
		return nil
	}
	k := a.f.flowKey(r.Flow.Client, int(r.Flow.Service))
	switch {
	case !a.f.hasConnections(k.Service):
		return fmt.Errorf("service %d is none of this load balancer's", r.Flow.Service)
	case a.startup != nil && (r.Gone || r.Quiet || r.To != 0):
		if n := a.startup.claims[backend]; n >= int(a.f.maps.LbFlows.MaxEntries())/2 {
			return fmt.Errorf("it has told of %d sessions that move, the most for one backend", n)
		}
		a.startup.claims[backend]++
		a.startup.open = append(a.startup.open, claim{backend, k, r})
		return nil
	case r.Gone || r.To != 0:
		return nil // its move ends by itself
	}
	return a.ownedBy(k, backend, r)
}

// ownedBy has a flow be a backend's that has a session of it, unless another backend has a better claim. a.mu is held.
func (a *Agent) ownedBy(k Key, backend move.Backend, r peer.FlowRecord) error {
	fl, err := a.f.Flow(k)
	if errors.Is(err, errNoFlow) {
		err = a.report(k, backend, move.Flow{Owner: backend, Epoch: r.Epoch})
		if a.startup != nil && err == nil {
			a.startup.ages[k] = r.Age
		}
		if errors.Is(err, ebpf.ErrKeyExist) {
			return nil // its backend has spoken just now
		}
		return err
	}
	if err != nil {
		return err
	}
	if fl.Owner == backend {
		return a.still(k, fl, r)
	}
	take := func(fl *Flow) bool {
		if fl.Owner == backend || fl.To != 0 || fl.Buffered || fl.Buffering || fl.Pinned || fl.Out > 0 || r.Quiet {
			return false // it moves, or its owner has been heard here
		}
		age, said := time.Duration(0), false
		if a.startup != nil {
			age, said = a.startup.ages[k]
		}
		switch {
		case r.Epoch != fl.Epoch:
			return r.Epoch > fl.Epoch
		case said: // one of both is of a connection that the client has forgotten
			return r.Age < age
		}
		return !fl.Told && !fl.Opening // a packet that went by the hash has made it known
	}
	if !take(&fl) {
		return nil
	}
	_, err = a.f.Change(k, func(fl *Flow) {
		if take(fl) {
			fl.Flow, fl.Incarnation, fl.Named = move.Flow{Owner: backend, Epoch: r.Epoch, Nonce: fl.Nonce}, 0, true
		}
	})
	if a.startup != nil {
		a.startup.ages[k] = r.Age
	}
	if errors.Is(err, errNoFlow) {
		return nil // it has ended meanwhile
	}
	return err
}

// still notes that a flow's owner has its session: it is not forgotten for want of packets. a.mu is held.
func (a *Agent) still(k Key, fl Flow, r peer.FlowRecord) error {
	if fl.Ended && !fl.ClientReset || fl.Named && !fl.ClientReset && since(fl.Seen) < a.o.IdleTimeout/8 && r.Epoch <= fl.Epoch {
		return nil
	}
	_, err := a.f.change(k, 0, kernel.Monotonic(), func(fl *Flow) {
		fl.Named = true
		if fl.To == 0 && !fl.Buffering && r.Epoch > fl.Epoch {
			fl.Epoch = r.Epoch // moves were forgotten here
		}
	})
	if errors.Is(err, errNoFlow) {
		return nil
	}
	return err
}

// endStartupIfDue ends the wait for backends if all have told of their sessions, or if it is over.
func (a *Agent) endStartupIfDue() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.startup == nil || a.ended {
		return
	}
	if over := kernel.Monotonic() >= a.startup.until; over || a.allTold() {
		a.decideOwners(over)
	}
}

// allTold says whether nobody is to be waited for any more. The caller holds mu.
func (a *Agent) allTold() bool {
	s := a.startup
	if s.byPartner {
		return true
	}
	expected := map[move.Backend]bool{}
	for number := range a.names {
		expected[number] = true
	}
	if a.o.Register && (len(expected) == 0 || time.Since(s.began) < minStartupTimeout) {
		return false
	}
	for number := range a.backends {
		expected[number] = true
	}
	for number := range expected {
		if !s.told[number] {
			return false
		}
	}
	return true
}

// decideOwners decides about sessions of which a backend alone could not say whose they are. a.mu is held.
func (a *Agent) decideOwners(over bool) {
	s := a.startup
	ends := map[Key]move.Epoch{} // of sessions that have been at their destination, the latest epoch
	for _, c := range s.open {
		if c.r.Gone {
			ends[c.key] = max(ends[c.key], c.r.Epoch)
		}
	}
	for _, leaving := range []bool{false, true} { // what has come counts before what was to leave
		for _, c := range s.open {
			if c.r.Gone || leaving != (c.r.To != 0) {
				continue
			}
			if err := a.decideClaim(c, ends[c.key]); err != nil {
				a.o.Log.Warn("a session that was about to move", "flow", c.key.Client, "err", err)
			}
		}
	}
	a.o.Log.Info("backends have told of their sessions", "backends", len(s.told), "sessions", len(s.ages), "moving", len(s.open), "timeout", over)
	a.startup = nil
	a.f.startupUntil.Store(0)
	if err := a.f.configure(); err != nil {
		a.o.Log.Warn("packets of unknown connections wait", "err", err)
	}
}

// decideClaim: a session that has come is its backend's, unless another one has it in a later epoch. One that was to leave is its backend's,
// about to move, if the destination has said that it has not had it: the move goes on, or is reclaimed. Else it is nobody's, and
// the source closes its copy.
func (a *Agent) decideClaim(c claim, ended move.Epoch) error {
	fl, err := a.f.Flow(c.key)
	known := err == nil
	if err != nil && !errors.Is(err, errNoFlow) {
		return err
	}
	want := move.Flow{Owner: c.backend, Epoch: c.r.Epoch}
	if c.r.To != 0 {
		want.To = c.r.To
		if !a.startup.told[c.r.To] || ended > c.r.Epoch || known && (fl.Owner == c.r.To || fl.Epoch > c.r.Epoch) {
			return nil
		}
	}
	switch {
	case !known:
		err = a.report(c.key, c.backend, want)
	case fl.Out > 0 && fl.Epoch >= c.r.Epoch || fl.Epoch > c.r.Epoch || fl.To != 0 || fl.Buffered || fl.Pinned:
		return nil
	default:
		_, err = a.f.Change(c.key, func(fl *Flow) {
			want.Nonce = fl.Nonce
			fl.Flow, fl.Incarnation = want, 0
		})
	}
	if errors.Is(err, errNoFlow) || errors.Is(err, ebpf.ErrKeyExist) {
		return nil // a packet has come in between, of a backend that has it
	}
	if err == nil && want.To != 0 {
		a.timers[c.key] = a.after(a.o.MoveTimeout, func() { a.lapse(c.key, want.Epoch) })
	}
	a.f.changed(c.key)
	return err
}

func (a *Agent) starting() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.startup != nil
}

// hasConnections says whether flows of this number are connections to a service.
func (f *DataPath) hasConnections(service int) bool { return f.matches(service, false) }
