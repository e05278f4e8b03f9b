// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/handoff/lb/names"
	"github.com/weir-project/weir/feature/handoff/lb/spec"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/kernel"
)

func (s State) instance(name string) (i kernel.Instance, there bool) {
	at := slices.IndexFunc(s.pinned, func(i kernel.Instance) bool { return i.Name == spec.PinPrefix+name })
	if at < 0 {
		return i, false
	}
	return s.pinned[at], true
}

// outages adds an outage to the plan for each change with lost flows, and refuses removed devices.
func (s State) outages(ctx context.Context, p *feature.Plan, want *Config) error {
	inst, there := s.instance(want.Name)
	if !there {
		return nil
	}
	absent := func(name string) bool { _, err := net.InterfaceByName(name); return err != nil }
	feature.Interfaces{Pos: want.Pos, Key: "lb: devices", Published: s.Spec.Devices, Spec: want.Devices, Works: func(name string) bool { return !absent(name) },
		Lacks: func(name string) string {
			if absent(name) {
				return "there is no interface " + name
			}
			return ""
		}}.Refuse(p)
	f, err := view(s.root, inst, "flows", "ring", "tunnels")
	if errors.Is(err, kernel.ErrNotExist) || errors.Is(err, kernel.ErrDamaged) {
		return nil // the load balancer is created again, without flows
	} else if err != nil {
		return err
	}
	defer f.Close()
	all := append(s.Spec.Losses(want, f.locations().Tunnelled()), s.takenNumbers(ctx, inst, want)...)
	if len(all) == 0 {
		return nil
	}
	flows := make([]int, len(all))
	err = f.Flows(func(k Key, fl Flow) bool {
		for i := range all {
			if !fl.Ended && all[i].Covers(k.Client.Addr(), k.Service, fl.Owner) {
				flows[i]++
			}
		}
		return true
	})
	registered := s.registered(ctx, inst, all)
	for i, l := range all {
		if l.Returns != 0 && registered[l.Returns] {
			continue
		}
		spreads := l.Service != spec.FlowsAlone && f.spreads(l.Service)
		after := ""
		if l.After != "" {
			after = "; " + l.After
		}
		switch {
		case flows[i] > 0 && spreads:
			p.Outage("lb: %s: %s, and so do new ones", l.Text, loses(flows[i]))
		case flows[i] > 0:
			p.Outage("lb: %s: %s%s", l.Text, loses(flows[i]), after)
		case spreads:
			p.Outage("lb: %s: backends serve its new flows now", l.Text)
		}
	}
	return err
}

// takenNumbers returns the losses of backends outside the file.
func (s State) takenNumbers(ctx context.Context, inst kernel.Instance, want *Config) []spec.Loss {
	if len(want.Backends) == 0 {
		return nil
	}
	addresses := map[move.Backend]netip.Addr{}
	st, _ := readStatus(ctx, s.root, inst) // without an answer the addresses are unknown
	for _, b := range st.Backends {
		addresses[b.Number] = b.Address
	}
	return s.Spec.Taken(want, names.Pinned(s.root, inst), addresses)
}

// registered returns the connected backends with a registration, here or at the partner. They register again after their removal
// from the file. The agent is asked only if a loss depends on it.
func (s State) registered(ctx context.Context, inst kernel.Instance, all []spec.Loss) map[move.Backend]bool {
	if !slices.ContainsFunc(all, func(l spec.Loss) bool { return l.Returns != 0 }) {
		return nil
	}
	out := map[move.Backend]bool{}
	st, _ := readStatus(ctx, s.root, inst) // without an answer no backend counts as registered
	for _, b := range st.Backends {
		out[b.Number] = b.Registered
	}
	return out
}

func loses(flows int) string {
	if flows == 1 {
		return "1 flow loses its backend"
	}
	return fmt.Sprintf("%s lose their backend", printable.Count(flows, "flow"))
}
