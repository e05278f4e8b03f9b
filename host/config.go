// SPDX-License-Identifier: Apache-2.0

package host

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/safefile"
	"github.com/weir-project/weir/internal/strictyaml"
	"github.com/weir-project/weir/service"
)

// Config is a configuration file: what the host should be. Features declare further keys ([feature.Sectioned]).
type Config struct {
	strictyaml.Pos `yaml:"-"`
	Group          string                    `yaml:"group"` // may read; default: weir, if there is such a group
	Services       map[string]*ServiceConfig `yaml:"services"`
	Sections       feature.Sections          `yaml:"-"`

	Rate        *feature.Rate `yaml:"-"` // of resets after this change; nil: what each service says
	AllowOutage bool          `yaml:"-"` // apply also where traffic that is served now would not be
	Only        []string      `yaml:"-"` // features that are applied; empty: all
	Confirm     time.Duration `yaml:"-"` // take the change back unless it is confirmed within it; 0: do not

	// Warned is told of the plan's warnings before it is carried out: some are of the change alone, such as a list that has
	// become empty, and a plan made later does not have them. nil: nobody is.
	Warned func(warning string) `yaml:"-"`

	hash string // SHA-256 of the file, in hex
}

// Keys implements strictyaml.Extended.
func (c *Config) Keys() []string { return feature.Keys(features) }

// Section implements strictyaml.Extended.
func (c *Config) Section(key string) any {
	if c.Sections == nil {
		c.Sections = feature.Sections{}
	}
	return c.Sections.Open(features, key)
}

// ServiceConfig is one service with the features' sections for it.
type ServiceConfig struct {
	service.Spec `yaml:",inline"`
	Sections     feature.Sections `yaml:"-"`
}

// Keys implements strictyaml.Extended.
func (s *ServiceConfig) Keys() []string { return feature.ServiceKeys(features) }

// Section implements strictyaml.Extended.
func (s *ServiceConfig) Section(key string) any {
	if s.Sections == nil {
		s.Sections = feature.Sections{}
	}
	return s.Sections.OpenService(features, key)
}

// maxFile bounds a configuration, in bytes.
const maxFile = 64 << 20

// LoadConfig reads and checks a file; "-" is standard input. Nothing of a file with an error is
// applied; the error lists everything found wrong, each with file, line and
// column. It is read for some features, all where only is empty.
func LoadConfig(path string, only ...string) (*Config, error) {
	name, data, err := safefile.Input(path, maxFile)
	if err != nil {
		return nil, fmt.Errorf("reading the configuration: %w", err)
	}
	return ParseConfig(name, data, only...)
}

// ParseConfig is LoadConfig on the text of a file.
func ParseConfig(path string, data []byte, only ...string) (*Config, error) {
	sum := sha256.Sum256(data)
	c := &Config{hash: hex.EncodeToString(sum[:]), Only: only}
	if err := strictyaml.Decode(path, data, c); err != nil {
		if former := moved(path, data); former != nil {
			return nil, former
		}
		return nil, err
	}
	for name, s := range c.Services {
		if s == nil {
			return nil, c.Pos.Errorf("services.%s is empty: say at least listen", name)
		}
		s.Name = name
	}
	var errs []error
	for _, f := range features {
		errs = append(errs, f.Validate(c.Document())...)
	}
	errs = append(errs, c.crowded()...)
	errs = append(errs, c.sameListens()...)
	if len(errs) > 0 {
		slices.SortStableFunc(errs, inOrderOfTheFile)
		return nil, errors.Join(errs...)
	}
	return c, nil
}

// Document is the file as features read it.
func (c *Config) Document() *feature.Document {
	d := &feature.Document{Sections: c.Sections, Rate: c.Rate}
	for _, name := range slices.Sorted(maps.Keys(c.Services)) {
		s := c.Services[name]
		d.Services = append(d.Services, feature.Service{Spec: s.Spec, Sections: s.Sections})
	}
	return d
}

// crowded refuses two features at one location with room for one program.
func (c *Config) crowded() (errs []error) {
	d := c.Document()
	var claimed []feature.Claim // of features further down the list
	for _, f := range slices.Backward(features) {
		mine := f.Claims(d)
		for _, a := range claimed {
			for _, b := range mine {
				if a.Location == b.Location && a.Netns == b.Netns {
					errs = append(errs, a.Pos.Errorf("%s: %s is at %s, which has room for one program: %s, or %s", a.Object, b.Object, a.Location, a.Remedy, b.Remedy))
				}
			}
		}
		claimed = append(claimed, mine...)
	}
	return errs
}

// sameListens refuses two addresses at which the features of this process listen and the kernel allows one.
func (c *Config) sameListens() (errs []error) {
	all := c.listens()
	for i, l := range all {
		for _, o := range all[:i] {
			if l.Excludes(o) {
				errs = append(errs, l.Errorf("%s: listen %q: %s.listen has that port, with %q in line %d: take another port for one of them", l.Section, l.Address, o.Section, o.Address, o.At("listen").Line))
			}
		}
	}
	return errs
}

// listens are the addresses at which the features of this process listen.
func (c *Config) listens() (all []feature.Listen) {
	for _, f := range featuresOnly(c.Only) {
		all = append(all, f.Listens(c.Document())...)
	}
	return all
}

func inOrderOfTheFile(a, b error) int {
	x, ok := errors.AsType[*strictyaml.Error](a)
	y, ok2 := errors.AsType[*strictyaml.Error](b)
	if !ok || !ok2 {
		return 0
	}
	return cmp.Or(cmp.Compare(x.Line, y.Line), cmp.Compare(x.Column, y.Column))
}
