// SPDX-License-Identifier: Apache-2.0

package host

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/weir-project/weir/feature/filter"
	"github.com/weir-project/weir/feature/guard"
	"github.com/weir-project/weir/feature/handoff/keeper"
	"github.com/weir-project/weir/feature/reroute"
	"github.com/weir-project/weir/feature/steer"
	"github.com/weir-project/weir/internal/safefile"
	"github.com/weir-project/weir/internal/strictyaml"
	"github.com/weir-project/weir/service"
)

// Config is a configuration file: what the host should be.
type Config struct {
	strictyaml.Pos `yaml:"-"`
	Group          string                    `yaml:"group"` // may read; default: weir, if there is such a group
	Services       map[string]*ServiceConfig `yaml:"services"`
	Filter         []filter.Filter           `yaml:"filter"`
	Handoff        keeper.Limits             `yaml:"handoff"`
	Reroute        []reroute.Path            `yaml:"reroute"`

	Rate        *steer.Rate   `yaml:"-"` // of resets after this change; nil: what each service says
	AllowOutage bool          `yaml:"-"` // apply also where traffic that is served now would not be
	Confirm     time.Duration `yaml:"-"` // take the change back unless it is confirmed within it; 0: do not

	// Warned is told of the plan's warnings before it is carried out: some are of the change alone, such as a list that has
	// become empty, and a plan made later does not have them. nil: nobody is.
	Warned func(warning string) `yaml:"-"`
}

// ServiceConfig is one service with the features' sections for it.
type ServiceConfig struct {
	service.Spec `yaml:",inline"`
	Steer        *steer.Options `yaml:"steer"`
	Guard        *guard.Options `yaml:"guard"`
}

// maxFile bounds a configuration, in bytes.
const maxFile = 64 << 20

// LoadConfig reads and checks a file; "-" is standard input. Nothing of a file with an error is
// applied; the error lists everything found wrong, each with file, line and
// column.
func LoadConfig(path string) (*Config, error) {
	name, data, err := safefile.Input(path, maxFile)
	if err != nil {
		return nil, fmt.Errorf("reading the configuration: %w", err)
	}
	return ParseConfig(name, data)
}

// ParseConfig is LoadConfig on the text of a file.
func ParseConfig(path string, data []byte) (*Config, error) {
	c := &Config{}
	if err := strictyaml.Decode(path, data, c); err != nil {
		return nil, err
	}
	for name, s := range c.Services {
		if s == nil {
			return nil, c.Pos.Errorf("services.%s is empty: say at least listen", name)
		}
		s.Name = name
	}
	var errs []error
	for _, f := range parts {
		errs = append(errs, f.validate(c)...)
	}
	errs = append(errs, c.crowded()...)
	if len(errs) > 0 {
		slices.SortStableFunc(errs, inOrderOfTheFile)
		return nil, errors.Join(errs...)
	}
	return c, nil
}

// crowded refuses a filter and a guard that want XDP of the same device: it has room for one program.
func (c *Config) crowded() (errs []error) {
	for _, f := range c.Filter {
		if f.Hook != filter.HookXDP && f.Hook != filter.HookXDPGeneric {
			continue
		}
		for _, name := range slices.Sorted(maps.Keys(c.Services)) {
			s := c.Services[name]
			if s.Guard == nil || s.Netns != f.Netns {
				continue
			}
			for _, device := range f.Interfaces {
				if slices.Contains(s.Guard.Interfaces, device) {
					errs = append(errs, f.Pos.Errorf("filter.%s: services.%s.guard is at XDP of %s, which has room for one program: use hook tcx or clsact for the filter, or leave interfaces out of the guard, which then decides at the sockets", f.Name, name, device))
				}
			}
		}
	}
	return errs
}

func inOrderOfTheFile(a, b error) int {
	x, ok := errors.AsType[*strictyaml.Error](a)
	y, ok2 := errors.AsType[*strictyaml.Error](b)
	if !ok || !ok2 {
		return 0
	}
	return cmp.Or(cmp.Compare(x.Line, y.Line), cmp.Compare(x.Column, y.Column))
}

// steer is the steering part, services in order of name. A service is steered even
// if it has no steer section, unless it has another feature's and no members.
func (c *Config) steer() (steer.Config, bool) {
	out := steer.Config{Rate: c.Rate}
	for _, name := range slices.Sorted(maps.Keys(c.Services)) {
		s := steer.Service{Spec: c.Services[name].Spec}
		o := c.Services[name].Steer
		if o == nil && c.Services[name].Guard != nil && len(s.Members) == 0 {
			continue
		}
		if o != nil {
			s.Options = *o
		} else {
			s.Options.Pos = s.Spec.Pos
		}
		out.Services = append(out.Services, s)
	}
	return out, len(out.Services) > 0
}

// guard is the guarding part, services in order of name.
func (c *Config) guard() (guard.Config, bool) {
	var out guard.Config
	for _, name := range slices.Sorted(maps.Keys(c.Services)) {
		if o := c.Services[name].Guard; o != nil {
			out.Services = append(out.Services, guard.Service{Spec: c.Services[name].Spec, Options: *o})
		}
	}
	return out, len(out.Services) > 0
}

// handoff is what weir serve's keeper keeps at most.
func (c *Config) handoff() (keeper.Limits, bool) {
	return c.Handoff, c.Handoff != keeper.Limits{}
}

// reroute is the part of links and the ways around them.
func (c *Config) reroute() (reroute.Config, bool) {
	return reroute.Config{Paths: c.Reroute}, len(c.Reroute) > 0
}

// Filters are the filters of the file, the files of their lists found.
func (c *Config) Filters() []filter.Filter {
	f, _ := c.filter()
	return f.Filters
}

// filter is the filtering part.
func (c *Config) filter() (filter.Config, bool) {
	out := filter.Config{Filters: slices.Clone(c.Filter)}
	return out, len(out.Filters) > 0
}
