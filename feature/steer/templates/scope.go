// SPDX-License-Identifier: Apache-2.0

package templates

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
	"github.com/weir-project/weir/internal/ipfix"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"golang.org/x/sys/unix"
)

// StableAfter is how long a member must have had its slot for a message that is
// heard now to have reached it for certain.
const StableAfter = time.Second

// Service is a service of the namespace as it was last read.
type Service struct {
	*state.Service
	slots   *slots.Reader // to see how they are now
	members []MemberID    // by slot
	coming  bool          // published, and perhaps not yet what packets go by
	since   uint64        // when it became as it is (kernel.Monotonic); 0: before it was first looked at
}

func (s *Service) close() {
	if s.slots != nil {
		s.slots.Close()
	}
}

// readMembers reads who has each slot. Slots that are not admitted have nobody.
func (s *Service) readMembers() ([]MemberID, error) {
	out := make([]MemberID, s.slots.Slots())
	for n := range out {
		v, err := s.slots.Raw(n)
		if err != nil {
			return nil, err
		}
		if slots.RowState(v.State) == slots.Admitted {
			out[n] = MemberID{v.Tgid, v.Start}
		}
	}
	return out, nil
}

// had says whether a member has its slot, and has had it for a while, as the slot has had what it serves now.
func (s *Service) had(slot int, who MemberID) bool {
	if s.slots == nil || s.coming {
		return false
	}
	v, err := s.slots.Raw(slot)
	return err == nil && slots.RowState(v.State) == slots.Admitted && who == MemberID{v.Tgid, v.Start} &&
		kernel.Monotonic()-max(v.Since, s.since) > uint64(StableAfter)
}

// arrive has what was published be taken for what packets go by, once it is: an apply of many services publishes the
// first long before it brings all into force.
func (t *Scope) arrive() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range t.Services {
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
func (t *Scope) coming() bool {
	return slices.ContainsFunc(t.Services, func(s *Service) bool { return s.coming })
}

// Scope keeps the templates of one network namespace.
type Scope struct {
	scope   string
	ns      *netns.Handle
	log     feature.Logger
	news    chan struct{} // told when a session may be due for a replay
	Store   *templateStore
	capture *templateCapture
	Inject  *injector

	mu       sync.Mutex
	Book     *Book
	Services []*Service // also those without templates: a port may be theirs
	counts   map[string]bpf.TemplatesCounts
	untold   map[string]uint64 // refused messages of a service that the log has not told of
	local    map[netip.Addr]bool
	unserved bool      // a session may be due for a replay
	Retry    time.Time // when to look again at what could not be replayed; zero: never
	retries  int       // how often that was put off
}

// OpenScope takes up what an earlier weir serve knew, and listens. It
// owns the store and the services from then on, unless it fails.
func OpenScope(store *templateStore, ns *netns.Handle, services []*Service, log feature.Logger, news chan struct{}) (*Scope, error) {
	t := &Scope{scope: record.Scope(ns), ns: ns, log: log, news: news, Store: store, Book: newBook(), Services: services,
		counts: map[string]bpf.TemplatesCounts{}, untold: map[string]uint64{}, local: map[netip.Addr]bool{}, unserved: true}
	err := t.restore()
	if err == nil {
		if err = ns.Do(func() (err error) { t.Inject, err = newInjector(); return err }); err == nil {
			t.capture, err = openTemplateCapture(ns, store.Pins.Maps["sessions"], templatePorts(services), t.Hear)
		}
	}
	if err != nil {
		t.Services = nil
		t.Close()
		return nil, err
	}
	return t, nil
}

// Known counts what is remembered.
func (t *Scope) Known() (exporters, templates int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.Book.Sessions), t.Book.Templates()
}

// Close stops listening. What is remembered stays pinned.
func (t *Scope) Close() {
	if t.capture != nil {
		t.capture.Close()
	}
	// hear may still be at work: it must not find its maps closed.
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range t.Services {
		s.close()
	}
	t.Services = nil
	if t.Inject != nil {
		t.Inject.Close()
	}
	t.Store.Close()
}

// restore reads the store, and clears away what a killed writer left of it.
func (t *Scope) restore() error {
	all, broken, err := loadSessions(t.Store.Pins.Maps["store"])
	if err != nil {
		return err
	}
	for _, k := range broken {
		t.Store.Pins.Maps["store"].Delete(k)
	}
	noted, err := engine.Entries[bpf.TemplatesSession, bpf.TemplatesHeard](t.Store.Pins.Maps["sessions"])
	if err != nil && !errors.Is(err, ebpf.ErrIterationAborted) {
		return err
	}
	for k := range noted {
		if all[k] == nil {
			t.Store.Pins.Maps["sessions"].Delete(k)
		}
	}
	for k, s := range all {
		t.Book.Add(k, s)
		if _, ok := noted[k]; !ok {
			if err := t.Store.Enter(k, bpf.TemplatesHeard{Last: kernel.Monotonic()}); err != nil {
				return err
			}
		}
	}
	t.Prove()
	return nil
}

// follow takes over how the services are now.
func (t *Scope) follow(services []*Service) error {
	t.mu.Lock()
	for _, s := range t.Services {
		s.close()
	}
	t.Services = services
	clear(t.local)
	err := t.flushCounts()
	t.mu.Unlock()
	return errors.Join(err, t.capture.watch(templatePorts(services)))
}

func templatePorts(services []*Service) map[uint16]bool {
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

// findService returns the service that traffic to an address belongs to, if its
// templates are wanted, and the number of its endpoint.
func (t *Scope) findService(to netip.AddrPort) (best *Service, endpoint int) {
	bits := -1
	for _, s := range t.Services {
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

// Hear learns from one datagram. It runs in the goroutines of the capture.
func (t *Scope) Hear(m HeardMessage) {
	t.mu.Lock()
	defer t.mu.Unlock()
	svc, _ := t.findService(collectorAddr(m.Session))
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

func (t *Scope) learn(svc *Service, m HeardMessage) (learnt int, err error) {
	msg, err := ipfix.Parse(m.Payload)
	if err != nil {
		return 0, err
	}
	key := m.Session
	key.Version, key.Domain = msg.Version, msg.Domain
	s := t.Book.Sessions[key]
	fresh := s == nil
	if fresh {
		if !t.isLocal(collectorAddr(key).Addr()) {
			return 0, nil // on its way to another host
		}
		s = &FlowSession{Born: kernel.Monotonic()}
	}
	before := s.Size()
	changed, err := s.apply(msg.Changes)
	if !fresh {
		t.Book.grown(key, s, before)
	}
	if len(s.Templates) == 0 {
		t.Forget(key)
		return 0, err
	}
	if fresh {
		t.Book.Add(key, s)
	}
	t.makeRoom(key)
	if fresh {
		if err := t.Store.Enter(key, heardAs(&msg, m.Ifindex, kernel.Monotonic())); err != nil {
			t.Book.Remove(key)
			return 0, err
		}
	}
	if changed == 0 {
		return 0, err
	}
	s.Learnt = time.Now().UnixNano()
	t.noteServed(svc, key, s, fresh)
	return changed, errors.Join(err, t.Store.Save(key, s))
}

// noteServed says who has a session's templates after a message changed them:
// the member, if it had its slot when the message came and knew the others.
func (t *Scope) noteServed(svc *Service, key bpf.TemplatesSession, s *FlowSession, fresh bool) {
	slot, who := svc.memberFor(exporterAddr(key).Addr())
	if who != (MemberID{}) && (fresh || s.Served == who) && svc.had(slot, who) {
		s.Served = who
		return
	}
	s.Served, s.tries = MemberID{}, 0
	if who == (MemberID{}) {
		return // a member that comes has all sessions looked at
	}
	t.unserved = true
	Notify(t.news)
}

// memberFor returns the member that gets an address's traffic now, and its slot.
func (s *Service) memberFor(a netip.Addr) (slot int, who MemberID) {
	places, err := s.Where(state.WhatIf{}, a)
	if err != nil {
		return 0, MemberID{}
	}
	return s.memberAt(places[0])
}

func (s *Service) memberAt(p state.Assignment) (slot int, who MemberID) {
	slot = p.Slot
	if p.Instead != nil {
		slot = *p.Instead
	} else if !p.Admitted {
		return slot, MemberID{}
	}
	if slot >= len(s.members) || int(s.members[slot].Tgid) != p.PID {
		return slot, MemberID{}
	}
	return slot, s.members[slot]
}

// isLocal says whether an address is one of the host's own.
func (t *Scope) isLocal(a netip.Addr) bool {
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

// Forget drops a session from the book and from the store.
func (t *Scope) Forget(k bpf.TemplatesSession) {
	if s := t.Book.Sessions[k]; s != nil {
		t.Store.remove(k, s)
		t.Book.Remove(k)
	}
}
