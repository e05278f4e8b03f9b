// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"golang.org/x/sys/unix"
)

// settled is how long a member must have had its slot for a message that is
// heard now to have reached it for certain.
const settled = time.Second

// templateService is a service of the namespace as it was last read.
type templateService struct {
	*state.Service
	slots   *slots.Reader // to see how they are now
	members []memberID    // by slot
	coming  bool          // published, and perhaps not yet what packets go by
	since   uint64        // when it became as it is (kernel.Monotonic); 0: before it was first looked at
}

func (s *templateService) close() {
	if s.slots != nil {
		s.slots.Close()
	}
}

// readMembers reads who has each slot. Slots that are not admitted have nobody.
func (s *templateService) readMembers() ([]memberID, error) {
	out := make([]memberID, s.slots.Slots())
	for n := range out {
		v, err := s.slots.Raw(n)
		if err != nil {
			return nil, err
		}
		if slots.RowState(v.State) == slots.Admitted {
			out[n] = memberID{v.Tgid, v.Start}
		}
	}
	return out, nil
}

// had says whether a member has its slot, and has had it for a while, as the slot has had what it serves now.
func (s *templateService) had(slot int, who memberID) bool {
	if s.slots == nil || s.coming {
		return false
	}
	v, err := s.slots.Raw(slot)
	return err == nil && slots.RowState(v.State) == slots.Admitted && who == memberID{v.Tgid, v.Start} &&
		kernel.Monotonic()-max(v.Since, s.since) > uint64(settled)
}

// arrive has what was published be taken for what packets go by, once it is: an apply of many services publishes the
// first long before it brings all into force.
func (t *templateScope) arrive() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range t.services {
		if !s.coming {
			continue
		}
		if coming, err := engine.IsMarked(s.slots.Pins.Maps); err != nil || coming {
			continue // gone, or still under way
		}
		s.coming, s.since = false, kernel.Monotonic()
		t.unserved, t.retries = true, 0
	}
}

// coming says whether a service is not yet what packets go by.
func (t *templateScope) coming() bool {
	return slices.ContainsFunc(t.services, func(s *templateService) bool { return s.coming })
}

// templateScope keeps the templates of one network namespace.
type templateScope struct {
	scope   string
	ns      *netns.Handle
	log     feature.Logger
	news    chan struct{} // told when a session may be due for a replay
	store   *templateStore
	capture *templateCapture
	inject  *injector

	mu       sync.Mutex
	book     *templateBook
	services []*templateService // also those without templates: a port may be theirs
	counts   map[string]bpf.TemplatesCounts
	untold   map[string]uint64 // refused messages of a service that the log has not told of
	local    map[netip.Addr]bool
	unserved bool      // a session may be due for a replay
	retry    time.Time // when to look again at what could not be replayed; zero: never
	retries  int       // how often that was put off
}

// openTemplateScope takes up what an earlier weir serve knew, and listens. It
// owns the store and the services from then on, unless it fails.
func openTemplateScope(store *templateStore, ns *netns.Handle, services []*templateService, log feature.Logger, news chan struct{}) (*templateScope, error) {
	t := &templateScope{scope: record.Scope(ns), ns: ns, log: log, news: news, store: store, book: newTemplateBook(), services: services,
		counts: map[string]bpf.TemplatesCounts{}, untold: map[string]uint64{}, local: map[netip.Addr]bool{}, unserved: true}
	err := t.restore()
	if err == nil {
		if err = ns.Do(func() (err error) { t.inject, err = newInjector(); return err }); err == nil {
			t.capture, err = openTemplateCapture(ns, store.pins.Maps["sessions"], templatePorts(services), t.hear)
		}
	}
	if err != nil {
		t.services = nil
		t.Close()
		return nil, err
	}
	return t, nil
}

// known counts what is remembered.
func (t *templateScope) known() (exporters, templates int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.book.sessions), t.book.templates()
}

// Close stops listening. What is remembered stays pinned.
func (t *templateScope) Close() {
	if t.capture != nil {
		t.capture.Close()
	}
	// hear may still be at work: it must not find its maps closed.
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range t.services {
		s.close()
	}
	t.services = nil
	if t.inject != nil {
		t.inject.Close()
	}
	t.store.Close()
}

// restore reads the store, and clears away what a killed writer left of it.
func (t *templateScope) restore() error {
	all, broken, err := loadSessions(t.store.pins.Maps["store"])
	if err != nil {
		return err
	}
	for _, k := range broken {
		t.store.pins.Maps["store"].Delete(k)
	}
	noted, err := engine.Entries[bpf.TemplatesSession, bpf.TemplatesHeard](t.store.pins.Maps["sessions"])
	if err != nil && !errors.Is(err, ebpf.ErrIterationAborted) {
		return err
	}
	for k := range noted {
		if all[k] == nil {
			t.store.pins.Maps["sessions"].Delete(k)
		}
	}
	for k, s := range all {
		t.book.add(k, s)
		if _, ok := noted[k]; !ok {
			if err := t.store.enter(k, bpf.TemplatesHeard{Last: kernel.Monotonic()}); err != nil {
				return err
			}
		}
	}
	t.prove()
	return nil
}

// follow takes over how the services are now.
func (t *templateScope) follow(services []*templateService) error {
	t.mu.Lock()
	for _, s := range t.services {
		s.close()
	}
	t.services = services
	clear(t.local)
	err := t.flushCounts()
	t.mu.Unlock()
	return errors.Join(err, t.capture.watch(templatePorts(services)))
}

func templatePorts(services []*templateService) map[uint16]bool {
	ports := map[uint16]bool{}
	for _, s := range services {
		for _, port := range servicePorts(s.Service) {
			ports[port] = true
		}
	}
	return ports
}

// servicePorts are the UDP ports at which templates are remembered.
func servicePorts(s *state.Service) (ports []uint16) {
	for _, ep := range s.Endpoints {
		if ep.Proto == unix.IPPROTO_UDP && s.Record.Service.WantsTemplates(ep.Port) {
			ports = append(ports, ep.Port)
		}
	}
	return ports
}

// serviceOf returns the service that traffic to an address belongs to, if its
// templates are wanted, and the number of its endpoint.
func (t *templateScope) serviceOf(to netip.AddrPort) (best *templateService, endpoint int) {
	bits := -1
	for _, s := range t.services {
		for i, ep := range s.Endpoints {
			if ep.Proto == unix.IPPROTO_UDP && ep.Port == to.Port() && ep.Prefix.Contains(to.Addr()) && ep.Prefix.Bits() > bits {
				best, endpoint, bits = s, i, ep.Prefix.Bits()
			}
		}
	}
	if best == nil || !best.Record.Service.WantsTemplates(to.Port()) {
		return nil, 0
	}
	return best, endpoint
}

// hear learns from one datagram. It runs in the goroutines of the capture.
func (t *templateScope) hear(m heardMessage) {
	t.mu.Lock()
	defer t.mu.Unlock()
	svc, _ := t.serviceOf(collectorOf(m.session))
	if svc == nil {
		return
	}
	learnt, err := t.learn(svc, m)
	if learnt == 0 && err == nil {
		return
	}
	c := t.counts[svc.Name]
	c.Learnt += uint64(learnt)
	t.counts[svc.Name] = c
	if err != nil {
		t.refuse(svc.Name, 1)
	}
}

func (t *templateScope) learn(svc *templateService, m heardMessage) (learnt int, err error) {
	msg, err := parseTemplates(m.payload)
	if err != nil {
		return 0, err
	}
	key := m.session
	key.Version, key.Domain = msg.Version, msg.Domain
	s := t.book.sessions[key]
	fresh := s == nil
	if fresh {
		if !t.isLocal(collectorOf(key).Addr()) {
			return 0, nil // on its way to another host
		}
		s = &flowSession{Born: kernel.Monotonic()}
	}
	before := s.size()
	changed, err := s.apply(msg.Changes)
	if !fresh {
		t.book.grown(key, s, before)
	}
	if len(s.Templates) == 0 {
		t.forget(key)
		return 0, err
	}
	if fresh {
		t.book.add(key, s)
	}
	t.makeRoom(key)
	if fresh {
		if err := t.store.enter(key, msg.heardAs(m.ifindex, kernel.Monotonic())); err != nil {
			t.book.remove(key)
			return 0, err
		}
	}
	if changed == 0 {
		return 0, err
	}
	s.Learnt = time.Now().UnixNano()
	t.noteServed(svc, key, s, fresh)
	return changed, errors.Join(err, t.store.save(key, s))
}

// noteServed says who has a session's templates after a message changed them:
// the member, if it had its slot when the message came and knew the others.
func (t *templateScope) noteServed(svc *templateService, key bpf.TemplatesSession, s *flowSession, fresh bool) {
	slot, who := svc.memberFor(exporterOf(key).Addr())
	if who != (memberID{}) && (fresh || s.Served == who) && svc.had(slot, who) {
		s.Served = who
		return
	}
	s.Served, s.tries = memberID{}, 0
	if who == (memberID{}) {
		return // a member that comes has all sessions looked at
	}
	t.unserved = true
	notify(t.news)
}

// memberFor returns the member that gets an address's traffic now, and its slot.
func (s *templateService) memberFor(a netip.Addr) (slot int, who memberID) {
	places, err := s.Where(state.WhatIf{}, a)
	if err != nil {
		return 0, memberID{}
	}
	return s.memberAt(places[0])
}

func (s *templateService) memberAt(p state.Place) (slot int, who memberID) {
	slot = p.Slot
	if p.Instead != nil {
		slot = *p.Instead
	} else if !p.Admitted {
		return slot, memberID{}
	}
	if slot >= len(s.members) || int(s.members[slot].Tgid) != p.PID {
		return slot, memberID{}
	}
	return slot, s.members[slot]
}

// isLocal says whether an address is one of the host's own.
func (t *templateScope) isLocal(a netip.Addr) bool {
	if local, known := t.local[a]; known {
		return local
	}
	if a.IsLinkLocalUnicast() {
		return true // never on its way to elsewhere
	}
	local := false
	_ = t.ns.Do(func() error {
		routes, err := netlink.RouteGet(a.AsSlice())
		local = err == nil && len(routes) > 0 && routes[0].Type == unix.RTN_LOCAL
		return err
	})
	if len(t.local) > 4096 { // a flood to other hosts' addresses
		clear(t.local)
	}
	t.local[a] = local
	return local
}

func (t *templateScope) forget(k bpf.TemplatesSession) {
	if s := t.book.sessions[k]; s != nil {
		t.store.remove(k, s)
		t.book.remove(k)
	}
}
