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
	"github.com/weir-project/weir/internal/users"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

// Config is a configuration file. Features declare more keys ([feature.Sectioned]).
type Config struct {
	strictyaml.Pos `yaml:"-"`
	Group          string                    `yaml:"group"` // group with read access; default: weir, if the group exists
	Services       map[string]*ServiceConfig `yaml:"services"`
	Sections       feature.Sections          `yaml:"-"`

	Rate        *feature.Rate `yaml:"-"` // rate of resets after this change; nil: the rate of each service
	AllowOutage bool          `yaml:"-"` // apply even if served traffic is then lost
	Only        []string      `yaml:"-"` // features to apply; empty: all
	Confirm     time.Duration `yaml:"-"` // roll the change back unless it is confirmed within this time; 0: never

	// Warned receives the plan's warnings before the plan is applied. Some warnings concern only the change, such as a
	// list that has become empty, and a later plan lacks them. It may be nil.
	Warned func(warning string) `yaml:"-"`

	hash string // SHA-256 of the file in hex
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

// ServiceConfig is a service with its feature sections.
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

// LoadConfig reads and checks a file; "-" is standard input. Nothing of a file with an error is applied. The error lists
// all faults with file, line and column. The file is read for the features in only, or for all if it is empty.
func LoadConfig(path string, only ...string) (*Config, error) {
	name, data, err := safefile.Input(path, maxFile)
	if err != nil {
		return nil, fmt.Errorf("read the configuration: %w", users.Lacking(err, unix.CAP_DAC_READ_SEARCH))
	}
	return ParseConfig(name, data, only...)
}

// ParseConfig is LoadConfig for the text of a file.
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
			return nil, c.Pos.Errorf("services.%s is empty: add at least listen", name)
		}
		s.Name = name
	}
	var errs []error
	for _, s := range c.Document().Services {
		if err := s.CheckName(); err != nil {
			errs = append(errs, err)
		}
	}
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

// Document returns the file as read by features.
func (c *Config) Document() *feature.Document {
	d := &feature.Document{Sections: c.Sections, Rate: c.Rate}
	for _, name := range slices.Sorted(maps.Keys(c.Services)) {
		s := c.Services[name]
		d.Services = append(d.Services, feature.Service{Spec: s.Spec, Sections: s.Sections})
	}
	return d
}

// crowded rejects two features at one hook with room for one program.
func (c *Config) crowded() (errs []error) {
	d := c.Document()
	var claimed []feature.Claim // claims of features later in the list
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

// sameListens rejects two listen addresses of this process's features if the kernel allows only one.
func (c *Config) sameListens() (errs []error) {
	all := c.listens()
	for i, l := range all {
		for _, o := range all[:i] {
			if l.Excludes(o) {
				errs = append(errs, l.Errorf("%s: listen %q: %s.listen uses that port, with %q in line %d: use another port for one of them", l.Section, l.Address, o.Section, o.Address, o.At("listen").Line))
			}
		}
	}
	return errs
}

// listens returns the listen addresses of this process's features.
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
