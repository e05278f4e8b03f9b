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

// A new load balancer knows no flows. The hash alone does not find moved flows, or flows older than the latest change of backends
// or weights. Each backend's agent therefore reports its sessions when it connects, and repeats this later. Packets of unknown
// connections are dropped until all agents have reported, at most for Options.StartupTimeout. Clients repeat them.

const (
	defaultStartupTimeout = 5 * time.Second
	// minStartupTimeout is the time for backends outside the file to register. Their agents try to connect once a second.
	minStartupTimeout = 2 * time.Second
)

// startup holds the backends' reports so far. It ends once, with decideOwners.
type startup struct {
	began time.Time
	until uint64 // CLOCK_MONOTONIC, ns
	told  map[move.Backend]bool
	// byPartner: the partner knows the flows and has reported them.
	byPartner bool
	ages      map[Key]time.Duration // age of each reported flow
	claims    map[move.Backend]int  // number of open claims by backend
	open      []claim               // claims without an owner yet
}

// claim is a backend's report of a session about to move away, or of an arrived session without a packet so far.
type claim struct {
	backend move.Backend
	key     Key
	r       peer.FlowRecord
}

// beginStartup collects reports as long as the data path waits.
func (a *Agent) beginStartup() {
	if until := a.f.startupUntil.Load(); until > kernel.Monotonic() {
		a.startup = &startup{began: time.Now(), until: until, told: map[move.Backend]bool{}, claims: map[move.Backend]int{}, ages: map[Key]time.Duration{}}
	}
}

// hearOwned processes a backend's report of its sessions. last ends the report.
func (a *Agent) hearOwned(c *peer.Conn, records []peer.FlowRecord, last bool) {
	var errs []error
	for _, r := range records {
		if err := a.owned(c, r); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", r.Flow, err))
		}
	}
	if len(errs) > 0 {
		a.o.Log.Warn("cannot process reported sessions", "backend", c.Peer.Name, "sessions", len(errs), "err", errs[0])
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
		return fmt.Errorf("service %d is not this load balancer's", r.Flow.Service)
	case a.startup != nil && (r.Gone || r.Quiet || r.To != 0):
		if n := a.startup.claims[backend]; n >= int(a.f.maps.LbFlows.MaxEntries())/2 {
			return fmt.Errorf("it has reported %d moving sessions, the limit for one backend", n)
		}
		a.startup.claims[backend]++
		a.startup.open = append(a.startup.open, claim{backend, k, r})
		return nil
	case r.Gone || r.To != 0:
		return nil // its move ends by itself
	}
	return a.ownedBy(k, backend, r)
}

// ownedBy assigns a flow to a backend with a session of it, unless another backend has a better claim. The caller holds mu.
func (a *Agent) ownedBy(k Key, backend move.Backend, r peer.FlowRecord) error {
	fl, err := a.f.Flow(k)
	if errors.Is(err, errNoFlow) {
		err = a.report(k, backend, move.Flow{Owner: backend, Epoch: r.Epoch})
		if a.startup != nil && err == nil {
			a.startup.ages[k] = r.Age
		}
		if errors.Is(err, ebpf.ErrKeyExist) {
			return nil // its backend has just sent a packet
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
			return false // the flow is moving, or its owner's packets have been seen here
		}
		age, said := time.Duration(0), false
		if a.startup != nil {
			age, said = a.startup.ages[k]
		}
		switch {
		case r.Epoch != fl.Epoch:
			return r.Epoch > fl.Epoch
		case said: // the client has forgotten one of the two connections: the one with the later packet wins
			return r.Age < age
		}
		return !fl.Told && !fl.Opening // the flow is known by a packet sent to the hash's backend
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

// still notes that a flow's owner has its session, so the flow stays known without packets. The caller holds mu.
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

// endStartupIfDue ends the startup if all backends have reported their sessions, or at its timeout.
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

// allTold reports whether all expected backends have reported. The caller holds mu.
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

// decideOwners decides the open claims and ends the startup. The caller holds mu.
func (a *Agent) decideOwners(over bool) {
	s := a.startup
	ends := map[Key]move.Epoch{} // latest epoch of sessions that have been at their destination
	for _, c := range s.open {
		if c.r.Gone {
			ends[c.key] = max(ends[c.key], c.r.Epoch)
		}
	}
	for _, leaving := range []bool{false, true} { // arrived sessions count before leaving ones
		for _, c := range s.open {
			if c.r.Gone || leaving != (c.r.To != 0) {
				continue
			}
			if err := a.decideClaim(c, ends[c.key]); err != nil {
				a.o.Log.Warn("cannot decide moving session", "flow", c.key.Client, "err", err)
			}
		}
	}
	a.o.Log.Info("backends reported their sessions", "backends", len(s.told), "sessions", len(s.ages), "moving", len(s.open), "timeout", over)
	a.startup = nil
	a.f.startupUntil.Store(0)
	if err := a.f.configure(); err != nil {
		a.o.Log.Warn("cannot end startup of data path", "err", err)
	}
}

// decideClaim decides one claim:
//
//   - An arrived session belongs to its backend, unless another backend has it in a later epoch.
//   - A leaving session belongs to its backend if the destination has reported that it never had it. The move then continues
//     or is reclaimed.
//   - Any other leaving session belongs to nobody, and the source closes its copy.
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
		return nil // the owner's packet has made the flow known meanwhile
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

// hasConnections reports whether the number belongs to flows of a TCP service.
func (f *DataPath) hasConnections(service int) bool { return f.matches(service, false) }
