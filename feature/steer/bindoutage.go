// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/bindings"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/sockdiag"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

// OutagesOfBindings reports served traffic that ReplaceBindings, or with keep AddBindings, would direct to a service
// without a socket for it. The plan has no steps. from is r, or the lock if the caller holds it, which avoids a copy of
// all bindings.
func OutagesOfBindings(ctx context.Context, r *kernel.Root, from bindings.Opener, ns *netns.Handle, want []bindings.Binding, keep bool) (plan feature.Plan, err error) {
	s, err := readServed(r, from, record.Scope(ns))
	if err != nil {
		return plan, err
	}
	defer s.Close()
	if !slices.ContainsFunc(want, func(b bindings.Binding) bool { return !s.serves(b.Service, b) }) {
		return plan, s.err
	}
	diff, err := s.bound.Diff(r, record.Scope(ns), want, keep)
	if err != nil {
		return plan, err
	}
	for _, m := range diff.Moved {
		if s.serves(m.From, m.Binding) && !s.serves(m.Service, m.Binding) && !enough(&plan) {
			lack, remedy := s.lack(m.Service)
			plan.Outage("%s would take traffic from %s, which has a socket for it; %s %s: %s", m.Binding, m.From, m.Service, lack, remedy)
		}
	}
	err = ns.Do(func() error {
		socks := map[bindings.Proto][]sockdiag.Socket{}
		local, err := service.LocalRoutes(netlink.FAMILY_ALL, unix.RTN_LOCAL)
		if err != nil {
			return err
		}
		for _, b := range diff.Added {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if s.serves(b.Service, b) || enough(&plan) {
				continue
			}
			from, err := s.owner(b)
			if err != nil {
				return err
			}
			if from != "" && s.serves(from, b) {
				lack, remedy := s.lack(b.Service)
				plan.Outage("%s would take traffic from %s, which has a socket for it; %s %s: %s", b, from, b.Service, lack, remedy)
				continue
			}
			if !slices.ContainsFunc(local, b.Prefix.Overlaps) {
				continue
			}
			if _, ok := socks[b.Proto]; !ok {
				if socks[b.Proto], err = engine.Bound(uint8(b.Proto), 0); err != nil {
					return err
				}
			}
			if losers := state.ConflictsAmong(b, addrs(b, local), socks[b.Proto], nil); len(losers) > 0 {
				lack, remedy := s.lack(b.Service)
				plan.Outage("%s: %s %s; %s: %s", b, b.Service, lack, losing(losers), remedy)
			}
		}
		return nil
	})
	return plan, cmp.Or(err, s.err)
}

// enough reports whether the plan already lists the maximum number of bindings.
func enough(plan *feature.Plan) bool { return len(plan.Outages) >= state.MaxTold }

// addrs returns the single addresses of local inside the binding's prefix.
func addrs(b bindings.Binding, local []netip.Prefix) (out []netip.Addr) {
	for _, p := range local {
		if p.IsSingleIP() && b.Prefix.Contains(p.Addr()) {
			out = append(out, p.Addr())
		}
	}
	return out
}

// servedNow knows the services of a namespace with a socket. It reads a service on demand: there may be 65,536, and a
// binding should take only milliseconds.
type servedNow struct {
	instances map[string]kernel.Instance // of configured services, by name
	reader    *state.Reader              // without counters and queues
	bound     *bindings.View             // nil: the namespace never had a binding or registered socket
	names     map[uint32]string          // of services, by number; nil: not read
	slots     map[string]bool            // configured; false: some of their traffic goes to an empty slot
	sockets   map[kindOfService]bool     // registered
	err       error                      // first error of bound
}

type kindOfService struct {
	name string
	kind uint32 // as numbered by engine.KindOfPacket
}

func readServed(r *kernel.Root, from bindings.Opener, scope string) (*servedNow, error) {
	all, err := r.Instances(spec.Name)
	if err != nil {
		return nil, err
	}
	s := &servedNow{instances: map[string]kernel.Instance{}, slots: map[string]bool{}, sockets: map[kindOfService]bool{}}
	for _, i := range all {
		if i.Scope == scope && kernel.ValidName(i.Name) {
			s.instances[i.Name] = i
		}
	}
	if s.bound, err = bindings.OpenServices(from, scope); err != nil && !errors.Is(err, kernel.ErrNotExist) {
		return nil, err
	}
	s.reader = state.NewReader(r)
	return s, nil
}

// Close closes the maps.
func (s *servedNow) Close() {
	if s.bound != nil {
		s.bound.Close()
	}
	s.reader.Close()
}

// owner names the service that loses its prefix, or a part of it, to a new binding. "" means none.
func (s *servedNow) owner(b bindings.Binding) (name string, err error) {
	if s.bound == nil {
		return "", nil
	}
	x, ok := s.bound.Bound.Lookup(b.Prefix.Addr(), uint8(b.Proto), b.Port)
	if !ok || x.Prefix.Bits() > b.Prefix.Bits() {
		return "", nil
	}
	if s.names == nil {
		if s.names, err = s.bound.Labels.Names(); err != nil {
			return "", err
		}
	}
	return s.names[x.Value-1], nil
}

// lack returns the reason of a service's missing socket, and the remedy.
func (s *servedNow) lack(name string) (lack, remedy string) {
	if _, configured := s.instances[name]; configured {
		return "has a slot without a member", "start the member, or use on_empty: next or pass"
	}
	return "has no socket for it", "weir steer register " + name + " first"
}

// serves reports whether the traffic of a binding reaches a socket of the service.
func (s *servedNow) serves(name string, b bindings.Binding) bool {
	if i, configured := s.instances[name]; configured {
		served, known := s.slots[name]
		if !known {
			x, err := s.reader.Service(i)
			// A damaged service counts as served: it must not block other bindings. Status reports it.
			served = err != nil || x.Bypassed || sum(lostTo(x.Record, emptyReasons(&x))) == 0
			s.slots[name] = served
		}
		return served
	}
	if s.bound == nil {
		return false
	}
	k := kindOfService{name, engine.KindOfPacket(b.Proto == unix.IPPROTO_TCP, b.Prefix.Addr().Is6())}
	has, known := s.sockets[k]
	if !known {
		var err error
		if has, err = s.bound.HasSocket(k.name, k.kind); err != nil && s.err == nil {
			s.err = err
		}
		s.sockets[k] = has
	}
	return has
}
