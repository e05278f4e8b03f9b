// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/strictyaml"
	"github.com/weir-project/weir/service"
)

// Name is the feature's name: pin directory, metric prefix, config key, CLI noun.
const Name = "guard"

// Config is the guard configuration of a host.
type Config struct {
	Services []Service
}

// Service is one guarded service.
type Service struct {
	service.Spec
	Options
}

// Options is the guard section of a service.
type Options struct {
	strictyaml.Pos `yaml:"-" json:"-"`
	Limit          Limit    `yaml:"limit" json:"limit,omitzero"`            // for all datagrams to the service
	Each           Limit    `yaml:"each" json:"each,omitzero"`              // for datagrams to each of its addresses and ports
	DryRun         bool     `yaml:"dry_run" json:"dry_run,omitempty"`       // decide and count, but drop nothing
	Interfaces     []string `yaml:"interfaces" json:"interfaces,omitempty"` // decide at XDP of these instead of at the sockets
}

// limits returns the limits for the programs.
func (o Options) limits() Limits { return Limits{Total: o.Limit, Each: o.Each, Dry: o.DryRun} }

// Validate checks the configuration beyond its types. Errors carry the position in the file.
func (c *Config) Validate() []error {
	var errs []error
	for i := range c.Services {
		s := &c.Services[i]
		fail := func(format string, a ...any) {
			errs = append(errs, s.Options.Pos.Errorf("services.%s.guard: "+format, append([]any{s.Name}, a...)...))
		}
		if s.Limit == 0 && s.Each == 0 {
			fail("no limit: set limit, for all datagrams, or each, for each address and port, like limit: 20kpps")
		}
		if len(s.udp()) == 0 {
			fail("the service has no UDP listen, and a guard limits only UDP: add a listen like %q, or omit guard", "udp :53")
		}
		for i, name := range s.Interfaces {
			if name == "" || len(name) > 15 || strings.ContainsAny(name, "/ \t\n:") {
				fail("interface %q: want an interface name of at most 15 bytes", name)
			} else if slices.Contains(s.Interfaces[:i], name) {
				fail("interface %q: named twice", name)
			}
		}
		s.Interfaces = slices.Sorted(slices.Values(s.Interfaces)) // a copy: the options share their slice with the configuration
	}
	return errs
}

// udp returns the service's UDP endpoints.
func (s Service) udp() []service.Endpoint {
	return slices.DeleteFunc(s.Endpoints(), func(e service.Endpoint) bool { return e.Proto != unix.IPPROTO_UDP })
}

// String returns the options as shown in plans.
func (o Options) String() string {
	var out []string
	if o.Limit != 0 {
		out = append(out, "limit "+o.Limit.String())
	}
	if o.Each != 0 {
		out = append(out, "each "+o.Each.String())
	}
	if o.DryRun {
		out = append(out, "dry run")
	}
	return strings.Join(append(out, "at "+o.location()), ", ")
}

// location returns the hook and interfaces.
func (o Options) location() string {
	if len(o.Interfaces) > 0 {
		return "XDP of " + strings.Join(o.Interfaces, ", ")
	}
	return "its sockets"
}

// overlaps rejects a second guard for the same datagrams in a namespace.
func overlaps(others []Service, s Service) error {
	for _, o := range others {
		if o.Netns != s.Netns {
			continue
		}
		for _, e := range s.udp() {
			for _, f := range o.udp() {
				if e.Overlaps(f) {
					return s.Options.Pos.Errorf("services.%s.guard: %s is already guarded by service %s", s.Name, e, o.Name)
				}
			}
		}
	}
	return nil
}
