// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/handoff/quarantine"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/kernel"
)

// addOutages adds the consequences of a change to the plan, if the agent of a network namespace runs: the agent ends,
// or registers under another identity.
func addOutages(ctx context.Context, p *feature.Plan, scope, change string) {
	s, err := statusOf(ctx, scope)
	if err != nil {
		return // no agent answers: the load balancer knows
	}
	if n := s.Sending + s.Receiving; n > 0 {
		p.Outage("handoff.backend: backend %s %s, and %s under way may end: see weir handoff backend status", s.Backend, change, printable.Count(n, "session"))
	}
	if s.LB && !s.Draining {
		p.Outage("handoff.backend: backend %s %s, and its load balancer then sends it no new flows and moves none of its sessions: run weir handoff drain first", s.Backend, change)
	}
}

// remove plans the removal of the backend of this network namespace.
func (s State) remove(ctx context.Context, p *feature.Plan) error {
	ns, err := netns.Current()
	if err != nil {
		return err
	}
	defer ns.Close()
	addOutages(ctx, p, kernel.ScopeOf(ns), "is removed")
	object := "backend"
	if s.Spec != nil {
		object = "backend " + s.Spec.Name
	}
	p.Add(feature.Step{Verb: "remove", Object: object, Do: func(_ context.Context, l *kernel.WriteLock) (string, error) { return "", removeHere(l) }})
	return nil
}

// outages adds the consequences of changes after which the load balancer treats this backend as another one, or the
// agent does not start.
func (s State) outages(ctx context.Context, p *feature.Plan, want *Config) error {
	change := ""
	switch {
	case s.Spec.Name != want.Name:
		change = "is renamed to " + want.Name
	case s.Spec.Number != want.Number:
		change = fmt.Sprintf("gets number %d in place of %d", want.Number, s.Spec.Number)
	}
	if s.Spec.LB.Address != want.LB.Address && change == "" {
		if err := dialable(ctx, want.LB.Address); err != nil {
			change = fmt.Sprintf("connects to lb.address %s (%v)", want.LB.Address, err)
		}
	}
	for _, d := range want.Devices {
		if _, err := net.InterfaceByName(d); err != nil && change == "" {
			change = "has no agent until interface " + d + " exists"
		}
	}
	if change == "" {
		return nil
	}
	ns, err := netns.Current()
	if err != nil {
		return err
	}
	defer ns.Close()
	addOutages(ctx, p, kernel.ScopeOf(ns), change)
	return nil
}

// dialTime is a plan's timeout for connecting to the file's load balancer.
const dialTime = time.Second

// dialable returns an error if a load balancer's address does not accept connections.
func dialable(ctx context.Context, address string) error {
	d := net.Dialer{Timeout: dialTime}
	c, err := d.DialContext(ctx, "tcp", address)
	if err == nil {
		c.Close()
	}
	return err
}

// PlanRemove implements feature.RemovePlanner: the backends of all network namespaces.
func (Feature) PlanRemove(ctx context.Context, r *kernel.Root) (p feature.Plan, err error) {
	all, err := quarantine.Store.Keys(r)
	for _, i := range all {
		ns, e := r.OpenNetns(i)
		if errors.Is(e, netns.ErrGone) {
			continue // its agent belongs to another namespace
		} else if e == nil {
			ns.Close()
		}
		addOutages(ctx, &p, i.Scope, "is removed")
	}
	return p, err
}

// PlanRemoveHere plans the removal of the backend of this network namespace, with its quarantine. A missing one is
// not an error.
func PlanRemoveHere(ctx context.Context, r *kernel.Root) (p feature.Plan, err error) {
	st, err := Feature{}.State(ctx, r)
	if err != nil {
		return p, err
	}
	ns, err := netns.Current()
	if err != nil {
		return p, err
	}
	defer ns.Close()
	if all, err := quarantine.Store.Keys(r); err != nil || st.Spec == nil && !slices.Contains(all, quarantine.Instance(ns)) {
		return p, err
	}
	err = st.remove(ctx, &p)
	return p, err
}
