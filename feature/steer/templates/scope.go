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

// StableAfter is the time a member must have had its slot before a message heard now has certainly reached it.
const StableAfter = time.Second

// Service is a service of the namespace as last read.
type Service struct {
	*state.Service
	slots   *slots.Reader // for the current members
	members []MemberID    // by slot
	coming  bool          // published, but maybe not in force yet
	since   uint64        // time of its last change (kernel.Monotonic); 0: before the first reading
}

func (s *Service) close() {
	if s.slots != nil {
		s.slots.Close()
	}
}

// readMembers reads the member of each slot. Slots that are not admitted have the zero MemberID.
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

// had reports whether a member has had its slot, with the current service, for longer than StableAfter.
func (s *Service) had(slot int, who MemberID) bool {
	if s.slots == nil || s.coming {
		return false
	}
	v, err := s.slots.Raw(slot)
	return err == nil && slots.RowState(v.State) == slots.Admitted && who == MemberID{v.Tgid, v.Start} &&
		kernel.Monotonic()-max(v.Since, s.since) > uint64(StableAfter)
}

// arrive marks published services as in force once they are. An apply of many services publishes the first long before
// it applies all.
func (t *Scope) arrive() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range t.Services {
		if !s.coming {
			continue
		}
		if coming, err := engine.IsMarked(s.slots.Pins.Maps); err != nil || coming {
			continue // removed, or still in progress
		}
		s.coming, s.since = false, kernel.Monotonic()
		t.unserved, t.retries = true, 0
	}
}

// coming reports whether a service is published but not in force.
func (t *Scope) coming() bool {
	return slices.ContainsFunc(t.Services, func(s *Service) bool { return s.coming })
}

// Scope keeps the templates of one network namespace.
type Scope struct {
	scope   string
	ns      *netns.Handle
	log     feature.Logger
	news    chan struct{} // notified when a session may be due
	Store   *templateStore
	capture *templateCapture
	Inject  *injector

	mu       sync.Mutex
	Book     *Book
	Services []*Service // also services without templates: a port may be theirs
	counts   map[string]bpf.TemplatesCounts
	untold   map[string]uint64 // refused messages not logged yet, by service
	local    map[netip.Addr]bool
	unserved bool      // a session may be due
	Retry    time.Time // time of the next retry; zero: none
	retries  int       // number of delays
}

// OpenScope loads the templates remembered by an earlier weir serve and starts the capture. On success it owns the
// store and the services.
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

// Known counts the remembered exporters and templates.
func (t *Scope) Known() (exporters, templates int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.Book.Sessions), t.Book.Templates()
}

// Close stops the capture. Remembered templates stay pinned.
func (t *Scope) Close() {
	if t.capture != nil {
		t.capture.Close()
	}
	// Hear may still run: it must not find its maps closed.
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

// restore reads the store and removes the incomplete entries of a killed writer.
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

// follow replaces the services by their current state.
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

// servicePorts returns the UDP ports with remembered templates.
func servicePorts(s *state.Service) (ports []uint16) {
	for _, ep := range s.Endpoints {
		if ep.Proto == unix.IPPROTO_UDP && s.Record.Service.WantsTemplates(ep.Port) {
			ports = append(ports, ep.Port)
		}
	}
	return ports
}

// findService returns the service and endpoint of a destination address, if the service's templates are wanted.
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
			return 0, nil // forwarded to another host
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

// noteServed records the member that has a session's templates after a change. This is the current member if it had its
// slot when the message arrived and knew the other templates.
func (t *Scope) noteServed(svc *Service, key bpf.TemplatesSession, s *FlowSession, fresh bool) {
	slot, who := svc.memberFor(exporterAddr(key).Addr())
	if who != (MemberID{}) && (fresh || s.Served == who) && svc.had(slot, who) {
		s.Served = who
		return
	}
	s.Served, s.tries = MemberID{}, 0
	if who == (MemberID{}) {
		return // a new member makes all sessions due
	}
	t.unserved = true
	Notify(t.news)
}

// memberFor returns the current slot and member of a source address.
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

// isLocal reports whether an address belongs to the host.
func (t *Scope) isLocal(a netip.Addr) bool {
	if local, known := t.local[a]; known {
		return local
	}
	if a.IsLinkLocalUnicast() {
		return true // never forwarded
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

// Forget removes a session from the book and the store.
func (t *Scope) Forget(k bpf.TemplatesSession) {
	if s := t.Book.Sessions[k]; s != nil {
		t.Store.remove(k, s)
		t.Book.Remove(k)
	}
}
