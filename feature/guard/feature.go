// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/probe"
)

// Feature implements the guard feature for package host.
type Feature struct{}

var (
	_ feature.Feature[Config, State] = Feature{}
	_ feature.Upgrader               = Feature{}
	_ feature.Recoverer              = Feature{}
	_ feature.Measured               = Feature{}
	_ feature.Examiner               = Feature{}
	_ feature.Runner                 = Feature{}
)

// Name implements feature.Feature.
func (Feature) Name() string { return Name }

// Needs implements feature.Feature. Needs of guards are optional in a configuration without guards.
func (Feature) Needs(c Config) []kernel.Need {
	swap, sockets, frames := probe.CompareAndSwap, probe.CgroupIngress, kernel.XDPProgram
	swap.Optional = len(c.Services) == 0
	at := func(interfaces bool) func(Service) bool {
		return func(s Service) bool { return (len(s.Interfaces) > 0) == interfaces }
	}
	sockets.Optional = !slices.ContainsFunc(c.Services, at(false))
	frames.Optional = !slices.ContainsFunc(c.Services, at(true))
	frames.For, frames.Remedy = "guard at interfaces", "omit interfaces: the guard then works at the sockets"
	return []kernel.Need{swap, sockets, probe.PacketNetnsCookie, frames}
}

// State implements feature.Feature.
func (Feature) State(ctx context.Context, r *kernel.Root) (State, error) { return readGuards(ctx, r) }

// Plan implements feature.Feature.
func (Feature) Plan(ctx context.Context, have State, want Config) (feature.Plan, error) {
	var plan feature.Plan
	plan.Stays(have.Unreadable)
	wanted := map[kernel.Instance]bool{}
	var late feature.Plan
	var placed []Service // with the namespace found
	for _, s := range want.Services {
		ns, _, err := s.FindNetns(ctx)
		if err != nil {
			return plan, s.Spec.Pos.Errorf("services.%s: netns: %w", s.Name, err)
		}
		t := target{published{Service: s, Netns: reference(s, ns)}, guards.Name(kernel.ScopeOf(ns), s.Name), ns.ID()}
		err = t.warnOfInterfaces(&plan, ns, have)
		ns.Close()
		if err != nil {
			return plan, err
		}
		s.Netns = t.instance.Scope
		if err := overlaps(placed, s); err != nil {
			return plan, err
		}
		placed = append(placed, s)
		wanted[t.instance] = true
		t.plan(&plan, &late, have)
	}
	if err := checkListens(placed); err != nil {
		return plan, err
	}
	for _, g := range have.Guards {
		if !wanted[g.rec.Instance] && !have.stays(g.rec.Instance) {
			plan.Add(removeStep(g.rec.Instance))
		}
	}
	plan.Steps = append(plan.Steps, late.Steps...)
	if probe.PacketNetnsCookie.Check() != nil && slices.ContainsFunc(want.Services, func(s Service) bool { return len(s.Interfaces) == 0 }) {
		plan.Warn("guards at sockets also count datagrams to the same address and port in other network namespaces, because this kernel does not report the namespace (Linux 6.15): set interfaces to decide there")
	}
	return plan, nil
}

// checkListens returns an error for more guarded prefixes than the programs support.
func checkListens(services []Service) error {
	byScope := map[string][]destination{}
	for _, s := range services { // Netns is the scope here
		for _, e := range s.udp() {
			byScope[s.Netns] = append(byScope[s.Netns], destination{prefix: e.Prefix, port: e.Port})
		}
		if _, err := listens(byScope[s.Netns]); err != nil {
			return s.Options.Pos.Errorf("services.%s.guard: %v", s.Name, err)
		}
	}
	return nil
}

// reference returns the name for reopening a service's namespace.
func reference(s Service, ns *netns.Handle) string {
	if s.Netns != "" {
		return s.Netns
	}
	return ns.String()
}

// Recover implements feature.Recoverer.
func (Feature) Recover(l *kernel.WriteLock) error { return recoverAll(l) }

// Remove implements feature.Feature.
func (Feature) Remove(ctx context.Context, l *kernel.WriteLock) error {
	// Remove the links first. Without its state, a guard passes all packets, and no guard should
	// remain half removed.
	if err := shared.RemoveAll(l, ""); err != nil {
		return err
	}
	all, err := guards.Keys(l.Root)
	if err != nil {
		return err
	}
	for _, i := range all {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := guards.Remove(l, i); err != nil {
			return err
		}
	}
	return nil
}

// target is the spec of a guard.
type target struct {
	published
	instance kernel.Instance
	id       netns.ID
}

// warnOfInterfaces warns of missing interfaces, and of interfaces with an XDP program of another
// owner.
func (t target) warnOfInterfaces(plan *feature.Plan, ns *netns.Handle, have State) error {
	return ns.Do(func() error {
		t.refuseAbsent(plan, ns, have)
		for _, name := range t.Service.Interfaces {
			index, err := interfaceIndex(name)
			if errors.Is(err, errNoInterface) {
				plan.Warn("guard of service %s in %s: there is no interface %s: nothing is limited there until weir serve, or weir apply, attaches the guard", t.Service.Name, ns, name)
			} else if err != nil {
				return t.Service.Options.Pos.Errorf("services.%s.guard: interface %q: %v in %s", t.Service.Name, name, err, ns)
			} else if program, about := (kernel.XDP{Ifindex: index, Device: name}).Occupant(); program != 0 && !have.limits(t.instance.Scope, name) {
				plan.Warn("guard of service %s in %s: XDP of %s is occupied by %s: weir apply rejects the guard until it is detached", t.Service.Name, ns, name, about)
			}
		}
		return nil
	})
}

// refuseAbsent adds an error to the plan if a working guard would move to missing interfaces. The
// caller is in the guard's network namespace.
func (t target) refuseAbsent(plan *feature.Plan, ns *netns.Handle, have State) {
	at := slices.IndexFunc(have.Guards, func(g GuardState) bool { return g.rec.Instance == t.instance })
	if at < 0 {
		return
	}
	was := have.Guards[at].rec.Spec.Service.Options
	change := feature.Interfaces{Pos: t.Service.Options.Pos, Key: fmt.Sprintf("services.%s.guard: interfaces", t.Service.Name), Published: was.Interfaces, Spec: t.Service.Interfaces,
		Works: func(name string) bool { _, err := interfaceIndex(name); return err == nil },
		Lacks: func(name string) string {
			if _, err := interfaceIndex(name); errors.Is(err, errNoInterface) {
				return fmt.Sprintf("there is no interface %s in %s", name, ns)
			}
			return "" // other errors end the plan
		}}
	if len(was.Interfaces) == 0 && have.Guards[at].Problem == "" {
		change.Beside = was.location()
	}
	change.Refuse(plan)
}

// limits reports whether a guard is configured for an interface. XDP then has the guard's program,
// or weir status reports the other owner.
func (st State) limits(scope, device string) bool {
	return slices.ContainsFunc(st.Guards, func(g GuardState) bool {
		return g.rec.Instance.Scope == scope && slices.Contains(g.rec.Spec.Service.Interfaces, device)
	})
}

// plan adds the guard's step. The step of a guard with a problem comes late: it may fail again and
// end the apply. By then the other guards, urgent during an attack, are done.
func (t target) plan(plan, late *feature.Plan, have State) {
	if have.stays(t.instance) {
		return
	}
	object := "guard of service " + t.Service.Name
	step := feature.Step{Object: object, Do: func(_ context.Context, l *kernel.WriteLock) (string, error) { return t.publish(l) }}
	i := slices.IndexFunc(have.Guards, func(g GuardState) bool { return g.rec.Instance == t.instance })
	if i < 0 {
		step.Verb, step.Detail = "create", t.Service.Options.String()
		plan.Add(step)
		return
	}
	g := have.Guards[i]
	step.Verb, step.Detail = "change", g.differences(t)
	if g.Problem != "" {
		plan = late
	}
	if step.Detail != "" {
		plan.Add(step)
	}
}

// stays reports whether a guard must stay unchanged, because it, or its namespace's @hooks, is
// unreadable.
func (st State) stays(i kernel.Instance) bool {
	return st.Unreadable.Has(i) || st.Unreadable.WithoutDamage().Has(hooksInstance(i.Scope))
}

func removeStep(i kernel.Instance) feature.Step {
	return feature.Step{Verb: "remove", Object: "guard of service " + i.Name,
		Do: func(_ context.Context, l *kernel.WriteLock) (string, error) { return remove(l, i) }}
}

// PlanUpgrade implements feature.Upgrader.
func (Feature) PlanUpgrade(ctx context.Context, r *kernel.Root) (feature.Plan, error) {
	var plan feature.Plan
	st, err := readGuards(ctx, r)
	if err != nil {
		return plan, err
	}
	plan.Stays(st.Unreadable)
	for _, scope := range st.outdated {
		plan.Add(feature.Step{Verb: "upgrade", Object: "guards of namespace " + scope, Detail: "programs of another weir",
			Do: func(_ context.Context, l *kernel.WriteLock) (string, error) { return "", upgradeHooks(l, scope) }})
	}
	return plan, nil
}
