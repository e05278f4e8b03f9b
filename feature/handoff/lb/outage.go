// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/kernel"
)

// changes says in words what want changes of c: services with their addresses, backends, and the names of other keys.
func (c *Config) changes(want *Config) string {
	out := feature.MapDifferences("service", c.Services, want.Services, func(name string, s ServiceConfig) string {
		at := make([]string, len(s.Listen))
		for i, l := range s.Listen {
			at[i] = l.String()
		}
		return fmt.Sprintf("%s (%s)", name, strings.Join(at, ", "))
	})
	out = append(out, feature.MapDifferences("backend", c.Backends, want.Backends, func(name string, _ BackendConfig) string { return name })...)
	return strings.Join(append(out, feature.KeyDifferences(c, want, "services", "backends")...), ", ")
}

// loss is traffic that a change takes from its backends.
type loss struct {
	what    string                    // "service talk at tcp 192.0.2.1:1790 is removed"
	has     func(k Key, fl Flow) bool // whether a flow is part of it
	service int                       // whose new flows are part of it; flowsAlone: none
	flows   int
}

const flowsAlone = -1

// losses are what a running load balancer with c takes from backends when it becomes want. tunnelled are the backends at the ends of tunnels.
func (c *Config) losses(want *Config, tunnelled map[move.Backend]bool) []loss {
	out := append(c.lostServices(want), c.lostBackends(want)...)
	for _, d := range c.Devices {
		if _, err := net.InterfaceByName(d); err == nil && !slices.Contains(want.Devices, d) {
			out = append(out, loss{what: "device " + d + " is removed, and packets of services that come by it go where the kernel's routes lead them",
				has: func(Key, Flow) bool { return true }, service: flowsAlone})
		}
	}
	if c.TunnelMTU > 0 && want.TunnelMTU == 0 {
		out = append(out, loss{what: "tunnels are removed (tunnel_mtu)", has: func(_ Key, fl Flow) bool { return tunnelled[fl.Owner] }, service: flowsAlone})
	}
	return out
}

// lostServices are addresses of services that go, or whose flows are other ones afterwards.
func (c *Config) lostServices(want *Config) (out []loss) {
	now := map[listen]Service{}
	for _, s := range want.services() {
		now[listen{s.Listen, s.Proto}] = s
	}
	for _, s := range c.services() {
		n, stays := now[listen{s.Listen, s.Proto}]
		change := ""
		switch {
		case !stays:
			change = "is removed"
		case n.ID != s.ID:
			change = fmt.Sprintf("gets number %d in place of %d, by which its flows are known", n.ID, s.ID)
		case n.BySource != s.BySource:
			change = "goes by " + by[n.BySource] + " in place of " + by[s.BySource]
		case n.Name != s.Name:
			change = fmt.Sprintf("is called %s, and a backend that registers for %s is refused", n.Name, s.Name)
		default:
			continue
		}
		out = append(out, loss{what: fmt.Sprintf("service %s at %s %s %s", s.Name, protocols[s.Proto], s.Listen, change), service: s.ID,
			has: func(k Key, _ Flow) bool {
				return k.Service == s.flows() && sameFamily(k.Client.Addr(), s.Listen.Addr())
			}})
	}
	return out
}

var (
	protocols = map[uint8]string{unix.IPPROTO_TCP: "tcp", unix.IPPROTO_UDP: "udp"}
	by        = map[bool]string{false: "flow", true: "source"}
)

// lostBackends are backends that are unknown afterwards, or whose number leads to another machine.
func (c *Config) lostBackends(want *Config) (out []loss) {
	now := want.numbers()
	was := c.numbers()
	for _, name := range sortedKeys(c.Backends) {
		b := c.Backends[name]
		number := move.Backend(b.Number)
		n, stays := now[number]
		change := ""
		again, named := want.Backends[name]
		switch {
		case !stays && named:
			change = fmt.Sprintf("gets number %d in place of %d, by which its flows are known", again.Number, number)
		case !stays && !want.Register:
			change = "is removed"
		case !stays:
			continue // it may register
		case n != name:
			change = fmt.Sprintf("gives its number %d to backend %s", number, n)
		case b.Address.IsValid() && want.Backends[n].Address.IsValid() && b.Address.Unmap() != want.Backends[n].Address.Unmap():
			change = fmt.Sprintf("gets address %s in place of %s", want.Backends[n].Address, b.Address)
		default:
			continue
		}
		out = append(out, loss{what: fmt.Sprintf("backend %s %s", name, change), has: func(_ Key, fl Flow) bool { return fl.Owner == number }, service: flowsAlone})
	}
	if c.Register && !want.Register {
		out = append(out, loss{what: "backends that registered are removed (register)", service: flowsAlone, has: func(_ Key, fl Flow) bool {
			return was[fl.Owner] == "" && now[fl.Owner] == ""
		}})
	}
	return out
}

// numbers are the names of the file's backends.
func (c *Config) numbers() map[move.Backend]string {
	out := map[move.Backend]string{}
	for name, b := range c.Backends {
		out[move.Backend(b.Number)] = name
	}
	return out
}

// instance is the pinned load balancer of a name in this network namespace.
func (s State) instance(name string) (i kernel.Instance, there bool) {
	at := slices.IndexFunc(s.pinned, func(i kernel.Instance) bool { return i.Name == pinPrefix+name })
	if at < 0 {
		return i, false
	}
	return s.pinned[at], true
}

// outages tells of flows, and of new flows of services, that a change takes from their backends.
func (s State) outages(p *feature.Plan, want *Config) error {
	inst, there := s.instance(want.Name)
	if !there {
		return nil
	}
	f, err := view(s.root, inst, "flows", "ring", "tunnels")
	if errors.Is(err, kernel.ErrNotExist) || errors.Is(err, kernel.ErrDamaged) {
		return nil // it is made anew, without flows
	} else if err != nil {
		return err
	}
	defer f.Close()
	all := s.Spec.losses(want, f.tunnelled())
	if len(all) == 0 {
		return nil
	}
	err = f.Flows(func(k Key, fl Flow) bool {
		for i := range all {
			if !fl.Ended && all[i].has(k, fl) {
				all[i].flows++
			}
		}
		return true
	})
	for _, l := range all {
		spreads := l.service != flowsAlone && f.spreads(l.service)
		switch {
		case l.flows > 0 && spreads:
			p.Outage("lb: %s: %d flows lose their backend, and so do new ones", l.what, l.flows)
		case l.flows > 0:
			p.Outage("lb: %s: %d flows lose their backend", l.what, l.flows)
		case spreads:
			p.Outage("lb: %s: backends serve its new flows now", l.what)
		}
	}
	return err
}
