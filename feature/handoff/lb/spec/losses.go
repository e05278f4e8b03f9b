// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/handoff/move"
)

// Changes describes the changes from c to want: services with their addresses, backends, and the
// names of other keys.
func (c *Config) Changes(want *Config) string {
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

// Loss is the traffic of a change that loses its backends.
type Loss struct {
	Text    string                                                        // for example "service talk at tcp 192.0.2.1:1790 is removed"
	Covers  func(client netip.Addr, service int, owner move.Backend) bool // reports whether a flow is lost; service is as in [Service.Flows]
	Service int                                                           // its new flows are lost; FlowsAlone: none
	After   string                                                        // effect on the flows; "": as in Text
	Returns move.Backend                                                  // nothing is lost if this backend is registered; 0: lost in any case
}

// FlowsAlone is the Service of a loss without new flows.
const FlowsAlone = -1

// toOthers is the effect on a removed backend's flows.
const toOthers = "their next packets go to other backends, and connections are reset"

// untilRegistered is the effect on the flows of a backend without an entry or address in the file,
// if it may register.
const untilRegistered = "their packets are dropped until it registers, and it is not registered now"

// drainFirst is the advice for removing a backend without a loss.
const drainFirst = ": drain it first: set weight: 0 until weir lb status shows no flows for it, or run weir handoff drain there"

// Losses returns the losses of a running load balancer's change from c to want. tunnelled are the
// backends behind tunnels.
func (c *Config) Losses(want *Config, tunnelled map[move.Backend]bool) []Loss {
	out := append(c.lostServices(want), c.lostBackends(want)...)
	for _, d := range c.Devices {
		if _, err := net.InterfaceByName(d); err == nil && !slices.Contains(want.Devices, d) {
			out = append(out, Loss{Text: "device " + d + " is removed, and services' packets from it follow the kernel's routes",
				Covers: func(netip.Addr, int, move.Backend) bool { return true }, Service: FlowsAlone})
		}
	}
	if c.TunnelMTU > 0 && want.TunnelMTU == 0 {
		out = append(out, Loss{Text: "tunnels are removed (tunnel_mtu)", Covers: func(_ netip.Addr, _ int, owner move.Backend) bool { return tunnelled[owner] }, Service: FlowsAlone})
	}
	return out
}

// lostServices returns the losses at service addresses that are removed or get other flows.
func (c *Config) lostServices(want *Config) (out []Loss) {
	type location struct {
		at    netip.AddrPort
		proto uint8
	}
	now := map[location]Service{}
	for _, s := range want.ServiceAddresses() {
		now[location{s.Listen, s.Proto}] = s
	}
	for _, s := range c.ServiceAddresses() {
		n, stays := now[location{s.Listen, s.Proto}]
		change := ""
		switch {
		case !stays:
			change = "is removed"
		case n.ID != s.ID:
			change = fmt.Sprintf("gets number %d in place of %d, and its flows are known by the old one", n.ID, s.ID)
		case n.BySource != s.BySource:
			change = "goes by " + by[n.BySource] + " in place of " + by[s.BySource]
		case n.Name != s.Name:
			change = fmt.Sprintf("is called %s, and backends registering for %s are rejected", n.Name, s.Name)
		default:
			continue
		}
		out = append(out, Loss{Text: fmt.Sprintf("service %s at %s %s %s", s.Name, protocols[s.Proto], s.Listen, change), Service: s.ID,
			Covers: func(client netip.Addr, service int, _ move.Backend) bool {
				return service == s.Flows() && SameFamily(client, s.Listen.Addr())
			}})
	}
	return out
}

var (
	protocols = map[uint8]string{unix.IPPROTO_TCP: "tcp", unix.IPPROTO_UDP: "udp"}
	by        = map[bool]string{false: "flow", true: "source"}
)

// lostBackends returns the losses of backends that are removed, and of numbers given to another
// machine.
func (c *Config) lostBackends(want *Config) (out []Loss) {
	now := want.numbers()
	was := c.numbers()
	for _, name := range slices.Sorted(maps.Keys(c.Backends)) {
		b := c.Backends[name]
		number := move.Backend(b.Number)
		n, stays := now[number]
		change, after, returns := "", "", move.Backend(0)
		if !stays {
			after = toOthers + drainFirst
		}
		again, named := want.Backends[name]
		switch {
		case !stays && named:
			change = fmt.Sprintf("gets number %d in place of %d, and its flows are known by the old one", again.Number, number)
		case !stays:
			change = "is removed"
			if want.Register {
				after, returns = untilRegistered+drainFirst, number
			}
		case n != name:
			change = fmt.Sprintf("gives its number %d to backend %s", number, n)
		case b.Address.IsValid() && want.Backends[n].Address.IsValid() && b.Address.Unmap() != want.Backends[n].Address.Unmap():
			change = fmt.Sprintf("gets address %s in place of %s", want.Backends[n].Address, b.Address)
		case b.Address.IsValid() && !want.Backends[n].Address.IsValid():
			change, after, returns = "has no address any more", untilRegistered, number
		default:
			continue
		}
		out = append(out, Loss{Text: fmt.Sprintf("backend %s %s", name, change), Covers: func(_ netip.Addr, _ int, owner move.Backend) bool { return owner == number }, Service: FlowsAlone, After: after,
			Returns: returns})
	}
	if c.Register && !want.Register {
		out = append(out, Loss{Text: "backends that registered are removed (register)", Service: FlowsAlone, After: toOthers, Covers: func(_ netip.Addr, _ int, owner move.Backend) bool {
			return was[owner] == "" && now[owner] == ""
		}})
	}
	return out
}

// Taken returns the losses of backends outside c, if want gives their number or address to another
// name, or them another number or address. names are the owners of numbers, addresses those of connected
// backends.
func (c *Config) Taken(want *Config, names map[move.Backend]string, addresses map[move.Backend]netip.Addr) (out []Loss) {
	was := c.numbers()
	for _, name := range slices.Sorted(maps.Keys(want.Backends)) {
		b := want.Backends[name]
		lose := func(number move.Backend, after, format string, args ...any) {
			out = append(out, Loss{Text: "backend " + name + " gets " + fmt.Sprintf(format, args...), Service: FlowsAlone, After: after,
				Covers: func(_ netip.Addr, _ int, owner move.Backend) bool { return owner == number }})
		}
		for _, number := range slices.Sorted(maps.Keys(names)) {
			at := addresses[number].Unmap()
			switch owner := names[number]; {
			case was[number] != "" || owner == "":
			case owner != name && number == move.Backend(b.Number):
				lose(number, "drain "+owner+" first: run weir handoff drain there", "number %d of registered backend %s", number, owner)
			case owner == name && number != move.Backend(b.Number):
				lose(number, "", "number %d in place of %d, and its flows are known by the old one", b.Number, number)
			case owner == name && at.IsValid() && b.Address.IsValid() && b.Address.Unmap() != at:
				lose(number, "", "address %s in place of %s", b.Address, at)
			case owner != name && at.IsValid() && b.Address.Unmap() == at:
				lose(number, "drain "+owner+" first: run weir handoff drain there", "address %s of registered backend %s", b.Address, owner)
			}
		}
	}
	return out
}

// numbers returns the names of the file's backends by number.
func (c *Config) numbers() map[move.Backend]string {
	out := map[move.Backend]string{}
	for name, b := range c.Backends {
		out[move.Backend(b.Number)] = name
	}
	return out
}
