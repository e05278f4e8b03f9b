// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/sockdiag"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

// A new service, or a new listen, takes over packets that the kernel previously gave to a bound socket. If a slot stays
// empty and rejects, that socket loses the slot's share. At a port without a socket nothing is lost: a first apply
// before the daemons start is no outage.

// takeover adds the outages of bound sockets whose traffic would go to an empty slot. s is the current service, or nil.
func (t *target) takeover(ctx context.Context, plan *feature.Plan, have state.State, s *state.Service, kind spec.Engine) error {
	eps := t.gained(s)
	if len(eps) == 0 || t.service.OnEmpty == spec.Pass || t.was != nil { // a rollback is never refused
		return nil
	}
	ns, err := slots.OpenNetns(t.netns, t.id)
	if errors.Is(err, slots.ErrNetnsGone) {
		return nil
	} else if err != nil {
		return err
	}
	defer ns.Close()
	losers, err := t.sockets().losers(ns, t.scope, eps)
	if err != nil || len(losers) == 0 {
		return err
	}
	p := &record.Service{Service: t.service}
	p.SetDevices(t.devices)
	var slots []slots.State
	if s != nil {
		slots = s.Slots
		p.Shape(s.Record)
	} else {
		p.Shape(nil)
	}
	reasons := t.emptyAfter(ctx, slots, true, ns)
	if kind == spec.EngineReuseport && !slices.ContainsFunc(reasons, func(err error) bool { return err == nil }) {
		return nil // its programs are attached with the first member
	}
	lost := lostTo(p, reasons)
	if already, all := lostAlready(have, t, eps); all && sum(lost) <= already {
		return nil
	}
	for n, buckets := range lost {
		if buckets > 0 && !(n < len(slots) && slots[n].Admitted()) { // otherwise reported as emptied
			plan.Outage("slot %d of service %s would stay empty (on_empty: %s) and get %d %% of the traffic of %s: %v: %s",
				n, t.service.Name, t.service.OnEmpty, percent(buckets), losers, reasons[n], remedy(p, n))
		}
	}
	return nil
}

// gained returns the endpoints that the change takes over from the kernel's own choice.
func (t *target) gained(s *state.Service) []service.Endpoint {
	eps := t.service.Endpoints()
	switch {
	case s == nil:
		return eps
	case s.Bypassed:
		return nil // apply keeps the bypass
	case s.OnEmpty == spec.Pass && !anyServed(s):
		return eps
	}
	return slices.DeleteFunc(eps, func(e service.Endpoint) bool { return slices.ContainsFunc(s.Endpoints, e.Overlaps) })
}

// anyServed reports whether any slot has a member.
func anyServed(s *state.Service) bool { return slices.ContainsFunc(s.Slots, slots.State.Admitted) }

// remedy returns the remedy for an empty slot.
func remedy(p *record.Service, slot int) string {
	switch {
	case p.Service.Member(slot) == nil && p.Service.Slots == 1:
		return "name a member for it"
	case p.Service.Member(slot) == nil:
		return "name a member for it, or set its weight to 0"
	case p.Service.OnEmpty == spec.Next:
		return "start a member, or use on_empty: pass"
	}
	return "start the member, or use on_empty: next or pass"
}

// lostTo counts, by slot, the buckets without service because the slot is empty.
func lostTo(p *record.Service, reasons []error) []int {
	served := slices.ContainsFunc(reasons, func(err error) bool { return err == nil })
	if p.Service.OnEmpty == spec.Pass || p.Service.OnEmpty == spec.Next && served {
		return make([]int, len(reasons))
	}
	return countLost(p, reasons, func(int) bool { return true })
}

// countLost counts the buckets selected by some in slots with a reason to be empty, by slot.
func countLost(p *record.Service, reasons []error, some func(bucket int) bool) []int {
	lost := make([]int, len(reasons))
	for b, slot := range p.Table {
		if reasons[slot] != nil && some(b) {
			lost[slot]++
		}
	}
	return lost
}

func sum(all []int) (n int) {
	for _, x := range all {
		n += x
	}
	return n
}

// lostAlready returns the buckets of another service that already go to empty slots. all reports whether that service
// covers all endpoints now. A renamed service then takes away no more than before.
func lostAlready(st state.State, t *target, eps []service.Endpoint) (buckets int, all bool) {
	for i := range st.Services {
		o := &st.Services[i]
		if o.PinScope == t.scope && o.Name != t.service.Name && !o.Bypassed && o.Record != nil &&
			!slices.ContainsFunc(eps, func(e service.Endpoint) bool { return !slices.ContainsFunc(o.Endpoints, e.Overlaps) }) {
			return sum(lostTo(o.Record, emptyReasons(o))), true
		}
	}
	return 0, false
}

// emptyReasons returns the reasons of empty slots, nil for the others.
func emptyReasons(s *state.Service) []error {
	out := make([]error, s.Record.Service.Slots)
	if len(s.Slots) == 0 { // its engine is missing
		for n := range out {
			out[n] = errors.New(s.Problem)
		}
	}
	for n, slot := range s.Slots {
		if !slot.Admitted() {
			out[n] = errors.New(slot.Reason)
		}
	}
	return out
}

// boundSockets caches the sockets at ports of namespaces and their processes, because services of a plan share ports.
type boundSockets struct {
	at    map[string][]sockdiag.Socket
	names map[uint32]string // by inode
	local map[string][]netip.Prefix
}

// sockets returns the batch's cache.
func (t *target) sockets() *boundSockets {
	if t.batch == nil {
		return newBoundSockets()
	}
	return t.batch.bound
}

func newBoundSockets() *boundSockets {
	return &boundSockets{at: map[string][]sockdiag.Socket{}, names: map[uint32]string{}, local: map[string][]netip.Prefix{}}
}

// losing lists sockets with their processes.
type losing []string

func (l losing) String() string {
	if len(l) > state.MaxTold {
		return strings.Join(l[:state.MaxTold], ", ") + " and more"
	}
	return strings.Join(l, ", ")
}

// losers returns the sockets that receive packets of the endpoints by the kernel's own choice.
func (b *boundSockets) losers(ns *netns.Handle, scope string, eps []service.Endpoint) (out losing, err error) {
	err = ns.Do(func() error {
		for _, e := range eps {
			key := fmt.Sprint(scope, e.Proto, e.Port)
			socks, ok := b.at[key]
			if !ok {
				if socks, err = engine.Bound(e.Proto, e.Port); err != nil {
					return err
				}
				b.at[key] = socks
			}
			for _, s := range socks {
				if s.Inode == 0 || len(out) > state.MaxTold {
					continue
				}
				gets, err := b.gets(scope, s, e)
				if err != nil {
					return err
				}
				if text := fmt.Sprintf("%s at %s", b.name(s.Inode), s.Local); gets && !slices.Contains(out, text) {
					out = append(out, text)
				}
			}
		}
		return nil
	})
	return out, err
}

// name returns the process of a socket. After MaxTold names it stops searching, because each search reads all of /proc.
func (b *boundSockets) name(inode uint32) string {
	if name, ok := b.names[inode]; ok {
		return name
	}
	name := "a process"
	if len(b.names) <= state.MaxTold {
		if pids := state.PIDs(inode); len(pids) > 0 {
			name = state.ProcessName(pids[0])
		}
	}
	b.names[inode] = name
	return name
}

// gets reports whether a socket receives packets of an endpoint, in the calling thread's namespace.
func (b *boundSockets) gets(scope string, s sockdiag.Socket, e service.Endpoint) (bool, error) {
	a := s.Local.Addr().Unmap()
	if s.Family != e.Family && (e.Family != unix.AF_INET || s.V6Only) {
		return false, nil
	}
	if !a.IsUnspecified() {
		return e.Prefix.Contains(a), nil
	}
	if e.Prefix.Bits() == 0 {
		return true, nil
	}
	return b.isLocal(scope, e.Prefix)
}

// isLocal reports whether addresses of a prefix belong to this host.
func (b *boundSockets) isLocal(scope string, p netip.Prefix) (bool, error) {
	local, ok := b.local[scope]
	if !ok {
		var err error
		if local, err = service.LocalRoutes(netlink.FAMILY_ALL, unix.RTN_LOCAL); err != nil {
			return false, err
		}
		b.local[scope] = local
	}
	return slices.ContainsFunc(local, p.Overlaps), nil
}
