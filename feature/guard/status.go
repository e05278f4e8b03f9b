// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/guard/bpf"
	"github.com/weir-project/weir/internal/guardstate"
	"github.com/weir-project/weir/internal/hookorder"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
)

// State is the state of this host's guards, read from the pins.
type State struct {
	Guards     []GuardState         `json:"guards"`
	Unreadable instances.Unreadable `json:"unreadable,omitempty"`

	outdated []string // scopes with programs of another weir
}

// Unread implements feature.Unreads.
func (st State) Unread() instances.Unreadable { return st.Unreadable }

// GuardState is the state of one guard.
type GuardState struct {
	Service string   `json:"service"`
	Netns   string   `json:"netns"`
	Listen  []string `json:"listen"`
	At      string   `json:"at"`             // hook and interfaces
	Limit   Limit    `json:"limit,omitzero"` // packets per second
	Each    Limit    `json:"each,omitzero"`  // of each destination, packets per second
	DryRun  bool     `json:"dry_run"`        // refused packets pass
	Problem string   `json:"problem,omitempty"`
	// Positions are the positions among the programs at its hooks, as far as the caller may read
	// them.
	Positions []hookorder.Position `json:"positions,omitempty"`
	Counts

	Destinations []Destination `json:"destinations,omitempty"` // most refused first; of guards with a limit for each

	rec record
}

// Service returns the guards of a service, one for each of its namespaces.
func (st State) Service(name string) []GuardState {
	return slices.DeleteFunc(slices.Clone(st.Guards), func(g GuardState) bool { return g.Service != name })
}

// Destination is one address and port of a guard with a limit for each.
type Destination struct {
	Address netip.AddrPort `json:"address"`
	Passed  uint64         `json:"passed"`
	Refused uint64         `json:"refused"`
}

// Err returns an error about unreadable guards, or nil. Faults reports damaged ones.
func (st State) Err() error { return st.Unreadable.WithoutDamage().Err() }

// readGuards reads the guards from their pins.
func readGuards(_ context.Context, r *kernel.Root) (State, error) {
	st := State{Guards: []GuardState{}} // [] in JSON, not null
	all, unreadable, err := guards.All(r)
	if err != nil {
		return st, err
	}
	st.Unreadable = unreadable
	for _, rec := range all {
		g, err := readGuard(r, rec)
		if errors.Is(err, kernel.ErrNotExist) {
			continue // removed meanwhile
		} else if err != nil {
			st.Unreadable.Add(rec.Instance, err)
			continue
		}
		st.Guards = append(st.Guards, g)
	}
	slices.SortFunc(st.Guards, func(a, b GuardState) int { return strings.Compare(a.Service+a.rec.Scope, b.Service+b.rec.Scope) })
	hooks, unreadable, err := shared.All(r)
	for _, rec := range hooks {
		if shared.Outdated(rec) {
			st.outdated = append(st.outdated, rec.Scope)
		}
	}
	st.Unreadable = append(st.Unreadable, unreadable...)
	return st, err
}

func readGuard(r *kernel.Root, rec record) (g GuardState, err error) {
	o, err := r.Open(rec.Instance)
	if err != nil {
		return g, err
	}
	defer o.Close()
	s, err := readState(o.Maps[pinState])
	if err != nil {
		return g, fmt.Errorf("%s: %w", rec.Instance, err)
	}
	p := rec.Spec
	g = GuardState{Service: p.Service.Name, Netns: p.Netns, At: p.Service.location(), Limit: p.Service.Limit, Each: p.Service.Each,
		DryRun: p.Service.DryRun, Counts: s.Read(kernel.Monotonic()), rec: rec}
	for _, l := range p.Service.Listen {
		if l.Proto == unix.IPPROTO_UDP {
			g.Listen = append(g.Listen, l.String())
		}
	}
	if p.Service.Each != 0 {
		if g.Destinations, err = readTargets(o.Maps[pinEach]); err != nil {
			return g, err
		}
	}
	g.Problem, g.Positions = problem(r, rec, o.Maps[pinState], s), positions(r, rec)
	return g, nil
}

// problem returns the reason for a guard not being in effect, or "".
func problem(r *kernel.Root, rec record, m *ebpf.Map, s *guardstate.Layout) string {
	p := rec.Spec
	o, err := r.Open(hooksInstance(rec.Scope), pinListens, pinStates)
	if errors.Is(err, kernel.ErrNotExist) {
		return "nothing is attached: weir apply recovers it"
	} else if err != nil {
		return err.Error()
	}
	defer o.Close()
	if s.Limits() != p.Service.limits().Layout() {
		return "its limits are not in force: weir apply recovers it"
	}
	if found, err := p.found(o, m); err != nil {
		return err.Error()
	} else if !found {
		return "no packet reaches it, because its setup was interrupted: weir apply recovers it, weir serve within seconds"
	}
	ns, err := rec.Netns()
	if errors.Is(err, netns.ErrGone) {
		return "its network namespace is gone, or is not visible to this user: " + netns.RemedyGone
	} else if err != nil {
		return "" // only root can check
	}
	defer ns.Close()
	at, err := p.unattached(o, ns, interfaces(r, rec.Scope))
	switch {
	case err != nil:
		return err.Error()
	case len(at.lacking) > 0:
		return "not attached at " + strings.Join(at.lacking, ", ") + ": weir apply attaches it, weir serve within seconds"
	case len(at.renamed) > 0 && len(at.absent) > 0:
		return "still attached at " + strings.Join(at.renamed, ", ") + ", named by no guard and perhaps renamed from " + strings.Join(at.absent, ", ") +
			": weir serve, or weir apply, takes the guard off"
	case len(at.absent) > 0:
		return "there is no interface " + strings.Join(at.absent, ", ") + ": weir serve, or weir apply, attaches the guard once it appears"
	}
	return ""
}

// positions reads the positions of the guard's programs at their hooks. It skips unreadable ones:
// problem reports them.
func positions(r *kernel.Root, rec record) (out []hookorder.Position) {
	ns, err := rec.Netns()
	if err != nil {
		return nil
	}
	defer ns.Close()
	o, err := r.Open(hooksInstance(rec.Scope), pinListens)
	if err != nil {
		return nil
	}
	defer o.Close()
	h := &hooks{ns: ns, pins: o}
	_ = ns.Do(func() error {
		at := h.attachments([]record{rec}, failures{})
		for _, name := range slices.Sorted(maps.Keys(at)) {
			ln, err := o.Link(name)
			if err != nil {
				continue
			}
			if p, ok, err := kernel.PositionAt(at[name].at, ln); err == nil && ok {
				out = append(out, p)
			}
			ln.Close()
		}
		return nil
	})
	return out
}

// differences describes the changes to a published guard, "" for none.
func (g GuardState) differences(t target) string {
	var out []string
	have, want := g.rec.Spec.Service, t.Service
	add := func(what, a, b string) {
		if a != b {
			out = append(out, what+" "+a+" → "+b)
		}
	}
	add("limit", have.Limit.String(), want.Limit.String())
	add("each", have.Each.String(), want.Each.String())
	add("dry_run", fmt.Sprint(have.DryRun), fmt.Sprint(want.DryRun))
	add("at", have.location(), want.location())
	add("listen", fmt.Sprint(have.udp()), fmt.Sprint(want.udp()))
	add("netns", g.rec.Ref, t.Netns)
	if len(out) == 0 && g.Problem != "" && !strings.HasPrefix(g.Problem, "there is no interface ") {
		out = append(out, g.Problem)
	}
	return strings.Join(out, "; ")
}

// readTargets returns the destinations with the most refused packets.
func readTargets(m *ebpf.Map) ([]Destination, error) {
	var out []Destination
	var k bpf.GuardGuardTargetKey
	var v bpf.GuardGuardTarget
	it := m.Iterate()
	for it.Next(&k, &v) {
		a := netip.AddrFrom16(k.Address).Unmap()
		out = append(out, Destination{netip.AddrPortFrom(a, guardstate.NetworkOrder(k.Port)), v.Passed, v.Refused})
	}
	if err := it.Err(); err != nil && !errors.Is(err, ebpf.ErrIterationAborted) {
		return nil, fmt.Errorf("read destinations: %w", err)
	}
	slices.SortFunc(out, func(a, b Destination) int {
		return cmp.Or(cmp.Compare(b.Refused, a.Refused), a.Address.Compare(b.Address))
	})
	return out[:min(len(out), shownDestinations)], nil
}

const shownDestinations = 10
