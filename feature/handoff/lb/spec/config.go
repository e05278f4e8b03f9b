// SPDX-License-Identifier: Apache-2.0

// Package spec is the section lb of weir.yaml: the configuration, the services with their
// addresses, and the losses of a change.
package spec

import (
	"cmp"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/internal/strictyaml"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
)

// These are the limits of a load balancer.
const (
	MaxBackends = move.Backend(1<<10 - 1) // highest number of a backend
	MaxServices = 64
	MaxWeight   = 65535
)

// These are the defaults of the timeouts.
const (
	DefaultBufferTimeout = time.Second
	DefaultMoveTimeout   = 10 * time.Second
	DefaultIdleTimeout   = time.Hour
)

// PinFeature is the pin directory of load balancers, PinPrefix the prefix of their instances' names in it.
const (
	PinFeature = "handoff"
	PinPrefix  = "lb-"
)

// PinnedMaps returns the names of the maps that an instance has in each version. ok is false for an instance of something else.
func PinnedMaps(i kernel.Instance) (names []string, ok bool) {
	return []string{"backends", "counts", "flows", "macs", "ring", "services", "setup", "sources", "tunnels"},
		i.Feature == PinFeature && i.Scope != kernel.HostScope && strings.HasPrefix(i.Name, PinPrefix)
}

// Config is the section lb of weir.yaml. docs/LB.md describes each key.
type Config struct {
	strictyaml.Pos `yaml:"-" json:"-"`
	Name           string     `yaml:"name"`   // in its certificate, and of its pins
	Listen         string     `yaml:"listen"` // host:port for backends' agents
	TLS            peer.Files `yaml:"tls"`
	Devices        []string   `yaml:"devices"`
	TunnelMTU      int        `yaml:"tunnel_mtu"`
	// TunnelRootPorts drops packets of tunnels from source ports open to every user of a backend's
	// host.
	TunnelRootPorts bool                     `yaml:"tunnel_root_ports"`
	Register        bool                     `yaml:"register"`
	Services        map[string]ServiceConfig `yaml:"services"`
	Backends        map[string]BackendConfig `yaml:"backends" former:"hosts"`
	Partner         Partner                  `yaml:"partner"`
	BufferTimeout   time.Duration            `yaml:"buffer_timeout" former:"hold" zero:"default"`
	MoveTimeout     time.Duration            `yaml:"move_timeout" former:"lapse" zero:"default"`
	EndedTimeout    time.Duration            `yaml:"ended_timeout" former:"ended" zero:"default"`
	IdleTimeout     time.Duration            `yaml:"idle_timeout" former:"idle" zero:"default"`
	AgentTimeout    time.Duration            `yaml:"agent_timeout" former:"down" zero:"default"`
	StartupTimeout  time.Duration            `yaml:"startup_timeout" former:"settle" zero:"default"`
}

// Partner is the other load balancer of a pair.
type Partner struct {
	Name    string `yaml:"name"`    // in its certificate
	Address string `yaml:"address"` // host:port of its agent
}

// ServiceConfig is a service in the file.
type ServiceConfig struct {
	strictyaml.Pos `yaml:"-" json:"-"`
	Number         int              `yaml:"number"` // known to backends' agents; below 64
	Listen         []service.Listen `yaml:"listen"`
	By             string           `yaml:"by"` // flow or source
}

// BackendConfig is a backend in the file.
type BackendConfig struct {
	strictyaml.Pos `yaml:"-" json:"-"`
	Number         int        `yaml:"number"`
	Address        netip.Addr `yaml:"address"`
	Weight         *int       `yaml:"weight"` // absent: 1
	Services       []string   `yaml:"services"`
	Check          string     `yaml:"check"`
	Agent          string     `yaml:"agent"`
}

// Declared reports whether the file has the section.
func (c *Config) Declared() bool { return c.Name != "" }

// Validate checks the values. Errors have positions in the file.
func (c *Config) Validate() (errs []error) {
	if c.Pos.Line == 0 {
		return nil // the file has no such section
	}
	fail := func(p strictyaml.Pos, format string, a ...any) { errs = append(errs, p.Errorf(format, a...)) }
	if !kernel.ValidName(PinPrefix+c.Name) || c.Name == "" || len(c.Name) > 40 {
		fail(c.Pos, "lb: name %q: want 1 to 40 letters, digits, - and _", c.Name)
	}
	if len(c.Devices) == 0 {
		fail(c.Pos, "lb: devices: name the interfaces towards clients and towards backends")
	}
	if twice := repeated(c.Devices); twice != "" {
		fail(c.Pos, "lb: devices: %q is listed twice: name each interface once", twice)
	}
	if _, _, err := net.SplitHostPort(c.Listen); err != nil {
		fail(c.Pos, "lb: listen %q: want an address for backends' agents, like 0.0.0.0:7946", c.Listen)
	}
	if c.TLS.Certificate == "" || c.TLS.Key == "" || c.TLS.CA == "" {
		fail(c.Pos, "lb: tls: set the files of certificate, key and ca: agents require mutual TLS")
	}
	if len(c.Services) == 0 {
		fail(c.Pos, "lb: services: name at least one")
	}
	if len(c.Backends) == 0 && !c.Register {
		fail(c.Pos, "lb: backends: there are none, and none may register: name some, or set register: true")
	}
	if c.TunnelMTU != 0 && (c.TunnelMTU < 1280 || c.TunnelMTU > 65000) {
		fail(c.Pos, "lb: tunnel_mtu %d: want the underlay's MTU minus 50 (over IPv4) or 70 (over IPv6), 1280 to 65000; 0 for no tunnels", c.TunnelMTU)
	}
	if p := c.Partner; p != (Partner{}) {
		if _, _, err := net.SplitHostPort(p.Address); err != nil || p.Name == "" || p.Name == c.Name {
			fail(c.Pos, "lb: partner: want the name in the other load balancer's certificate (not %q) and its listen address, like {name: lb-b, address: 10.2.0.3:7946}", c.Name)
		}
	}
	for what, d := range map[string]time.Duration{"buffer_timeout": c.BufferTimeout, "move_timeout": c.MoveTimeout, "ended_timeout": c.EndedTimeout, "idle_timeout": c.IdleTimeout, "agent_timeout": c.AgentTimeout, "startup_timeout": c.StartupTimeout} {
		if d < 0 || d > 0 && d < 10*time.Millisecond {
			fail(c.Pos, "lb: %s %s: want 10 ms or more", what, d)
		}
	}
	if least := cmp.Or(c.BufferTimeout, DefaultBufferTimeout) + cmp.Or(c.MoveTimeout, DefaultMoveTimeout); cmp.Or(c.IdleTimeout, DefaultIdleTimeout) < least { // a move may last that long without a packet
		fail(c.Pos, "lb: idle_timeout %s: want at least buffer_timeout plus move_timeout, %s: a flow must not expire while it moves", cmp.Or(c.IdleTimeout, DefaultIdleTimeout), least)
	}
	c.checkServices(fail)
	c.checkBackends(fail)
	return errs
}

type failure func(p strictyaml.Pos, format string, a ...any)

func (c *Config) checkServices(fail failure) {
	numbers, places := map[int]string{}, map[service.Listen]string{}
	for _, name := range slices.Sorted(maps.Keys(c.Services)) {
		s := c.Services[name]
		if o, taken := numbers[s.Number]; taken || s.Number < 0 || s.Number >= MaxServices {
			fail(s.Pos, "lb.services.%s: number %d: want an unused number from 0 to %d%s", name, s.Number, MaxServices-1, has(o))
		}
		numbers[s.Number] = name
		if len(s.Listen) == 0 {
			fail(s.Pos, "lb.services.%s: listen: give its addresses, like [tcp 192.0.2.1:1790]", name)
		}
		for _, l := range s.Listen {
			if !l.Prefix.IsSingleIP() {
				fail(s.Pos, "lb.services.%s: listen %q: want one address, present on every backend, like tcp 192.0.2.1:1790", name, l)
			}
			if a := l.Prefix.Addr().Unmap(); l.Prefix.IsSingleIP() && !Unicast(a) {
				fail(s.Pos, "lb.services.%s: listen %q: %s cannot belong to one machine of a network: want a unicast address present on every backend", name, l, a)
			}
			if a, err := netip.ParseAddrPort(c.Listen); err == nil && l.Proto == unix.IPPROTO_TCP && a == netip.AddrPortFrom(l.Prefix.Addr(), l.Port) {
				fail(s.Pos, "lb.services.%s: listen %q: lb.listen in line %d uses that port, so agents' connections would go to backends: use another port for lb.listen", name, l, c.At("listen").Line)
			}
			if o, taken := places[l]; taken {
				fail(s.Pos, "lb.services.%s: %s is %s's", name, l, o)
			}
			places[l] = name
		}
		if s.By != "" && s.By != "flow" && s.By != "source" {
			fail(s.Pos, "lb.services.%s: by %q: want flow or source", name, s.By)
		}
	}
}

// Unicast reports whether an address can belong to one machine of a network.
func Unicast(a netip.Addr) bool {
	return !a.IsLoopback() && !a.IsMulticast() && !a.IsUnspecified() && a != netip.AddrFrom4([4]byte{255, 255, 255, 255})
}

// repeated returns a name that is twice in a list, "" for none.
func repeated(names []string) string {
	for i, n := range names {
		if slices.Contains(names[:i], n) {
			return n
		}
	}
	return ""
}

func has(o string) string {
	if o == "" {
		return ""
	}
	return fmt.Sprintf(" (%s has it)", o)
}

func (c *Config) checkBackends(fail failure) {
	numbers, at := map[int]string{}, map[netip.Addr]string{}
	for _, name := range slices.Sorted(maps.Keys(c.Services)) {
		for _, l := range c.Services[name].Listen {
			at[l.Prefix.Addr().Unmap()] = "service " + name
		}
	}
	for _, name := range slices.Sorted(maps.Keys(c.Backends)) {
		h := c.Backends[name]
		switch a := h.Address.Unmap(); {
		case !h.Address.IsValid():
		case !Unicast(a):
			fail(h.Pos, "lb.backends.%s: address %s: want the backend's address on its network", name, a)
		case at[a] != "":
			fail(h.Pos, "lb.backends.%s: address %s belongs to %s: give an address of the backend alone", name, a, at[a])
		default:
			at[a] = "backend " + name
		}
		if o, taken := numbers[h.Number]; taken || h.Number < 1 || h.Number > int(MaxBackends) {
			fail(h.Pos, "lb.backends.%s: number %d: want an unused number from 1 to %d%s", name, h.Number, MaxBackends, has(o))
		}
		numbers[h.Number] = name
		if !h.Address.IsValid() && !c.Register {
			fail(h.Pos, "lb.backends.%s: address: give its address, or set register: true", name)
		}
		if w := h.EffectiveWeight(); w < 0 || w > MaxWeight {
			fail(h.Pos, "lb.backends.%s: weight %d: want 0 to %d", name, w, MaxWeight)
		}
		if h.Check != "" {
			if _, err := netip.ParseAddrPort(h.Check); err != nil {
				fail(h.Pos, "lb.backends.%s: check %q: want an address and a port, like 10.0.0.7:80", name, h.Check)
			}
		}
		for _, s := range h.Services {
			if _, ok := c.Services[s]; !ok {
				fail(h.Pos, "lb.backends.%s: no service %q in lb.services", name, s)
			}
		}
	}
}

// EffectiveWeight returns the backend's weight, 1 by default.
func (h BackendConfig) EffectiveWeight() int {
	if h.Weight == nil {
		return 1
	}
	return *h.Weight
}
