// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"cmp"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/internal/strictyaml"
)

// Config is the section handoff.backend of weir.yaml. docs/BACKENDS.md describes each key.
type Config struct {
	strictyaml.Pos `yaml:"-" json:"-"`
	Name           string        `yaml:"name"`      // in its certificate
	Number         int           `yaml:"number"`    // at the load balancer
	Address        netip.Addr    `yaml:"address"`   // destination of the load balancer's packets for this backend
	Weight         *int          `yaml:"weight"`    // share of new flows; absent: 1
	Listen         string        `yaml:"listen"`    // host:port for other backends' agents
	Advertise      string        `yaml:"advertise"` // address announced to them; absent: listen
	TLS            peer.Files    `yaml:"tls"`
	LB             LBConfig      `yaml:"lb" former:"front"`
	Devices        []string      `yaml:"devices"`
	Services       []string      `yaml:"services"` // absent: all of the load balancer's
	Keeper         string        `yaml:"keeper" path:"file"`
	Buffer         bool          `yaml:"buffer" former:"park"` // buffer packets of departing sessions here, not at the load balancer
	Timeout        time.Duration `yaml:"timeout" former:"patience" zero:"default"`
	MaxQueues      int           `yaml:"max_queues" former:"limit" zero:"default"` // bytes of a session's queues
}

// LBConfig is the address of the load balancer's agent.
type LBConfig struct {
	Name    string   `yaml:"name"`  // in its certificate; absent: lb
	Names   []string `yaml:"names"` // of all load balancers at the address, in place of name
	Address string   `yaml:"address"`
}

// maxNumber is the largest backend number in a load balancer's flow record.
const maxNumber = 1<<10 - 1

// Validate checks rules beyond the types. Errors contain the position in the file.
func (c *Config) Validate() (errs []error) {
	if c.Pos.Line == 0 {
		return nil // the file lacks the section
	}
	fail := func(format string, a ...any) { errs = append(errs, c.Errorf("handoff.backend: "+format, a...)) }
	if c.Name == "" {
		fail("name: set this backend's name, as in its certificate")
	}
	if c.Number < 1 || c.Number > maxNumber {
		fail("number %d: set a unique number from 1 to %d", c.Number, maxNumber)
	}
	if !c.Address.IsValid() {
		fail("address: set this backend's address for the load balancer, like 192.0.2.11")
	}
	if a := c.Address.Unmap(); c.Address.IsValid() && (a.IsUnspecified() || a.IsLoopback() || a.IsMulticast()) {
		fail("address %s: set this backend's address for the load balancer, like 192.0.2.11", a)
	}
	if c.Weight != nil && *c.Weight < 0 {
		fail("weight %d: want 0 or more", *c.Weight)
	}
	if backend, _, err := net.SplitHostPort(cmp.Or(c.Advertise, c.Listen)); err != nil {
		fail("listen %q: set the address for other backends' agents, like 192.0.2.11:7947", cmp.Or(c.Advertise, c.Listen))
	} else if a, err := netip.ParseAddr(backend); backend == "" || err == nil && a.IsUnspecified() {
		fail("listen %q is a wildcard address: set advertise to the address for other backends", c.Listen)
	}
	if c.TLS.Certificate == "" || c.TLS.Key == "" || c.TLS.CA == "" {
		fail("tls: set the files of certificate, key and ca: agents require mutual TLS")
	}
	if _, _, err := net.SplitHostPort(c.LB.Address); err != nil {
		fail("lb: address %q: set the address of its agent, like 192.0.2.1:7946", c.LB.Address)
	}
	if c.LB.Name != "" && len(c.LB.Names) > 0 || slices.Contains(c.LB.Names, "") {
		fail("lb: set either name, or names, like [lb-a, lb-b], for an address shared by load balancers")
	}
	if len(c.Devices) == 0 {
		fail("devices: name the interfaces of the services' packets, in both directions")
	}
	for i, d := range c.Devices {
		if slices.Contains(c.Devices[:i], d) {
			fail("devices: %q is listed twice: name each interface once", d)
		}
	}
	if c.Timeout < 0 || c.Timeout > 0 && c.Timeout < 10*time.Millisecond {
		fail("timeout %s: want 10 ms or more, and less than buffer_timeout of the load balancer", c.Timeout)
	}
	if c.MaxQueues < 0 {
		fail("max_queues %d: want a number of bytes", c.MaxQueues)
	}
	return errs
}

// options returns the file's settings as Options.
func (c *Config) options() (Options, error) {
	config, err := c.TLS.LoadFor(c.Name)
	if err != nil {
		return Options{}, err
	}
	weight := 1
	if c.Weight != nil {
		weight = *c.Weight
	}
	names := c.LB.Names
	if len(names) == 0 {
		names = []string{cmp.Or(c.LB.Name, "lb")}
	}
	return Options{Name: c.Name, Number: move.Backend(c.Number), TLS: config, LB: Remote{Name: names[0], Address: c.LB.Address}, LBNames: names,
		Registration: peer.Registration{Address: c.Address, Weight: weight, Services: c.Services, Agent: cmp.Or(c.Advertise, c.Listen)},
		Serve:        c.Services, Devices: c.Devices, Keeper: c.Keeper, Buffer: c.Buffer, Timeout: c.Timeout, Limit: c.MaxQueues,
		TimeoutAt: c.At("timeout")}, nil
}
