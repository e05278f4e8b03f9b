// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"

	"github.com/weir-project/weir/feature"
)

// ServiceSection implements feature.ServiceSectioned: key guard of a service.
func (Feature) ServiceSection() any { return new(Options) }

// Spec implements feature.Feature: the guarded services.
func (Feature) Spec(d *feature.Document) (Config, bool) {
	var out Config
	for _, s := range d.Services {
		if o, ok := feature.Section[Options](s.Sections, Name); ok {
			out.Services = append(out.Services, Service{Spec: s.Spec, Options: o})
		}
	}
	return out, len(out.Services) > 0
}

// Claims implements feature.Claimer: XDP of the guards' interfaces.
func (Feature) Claims(c Config) (out []feature.Claim) {
	for _, s := range c.Services {
		for _, device := range s.Interfaces {
			out = append(out, feature.Claim{Pos: s.Options.Pos, Object: fmt.Sprintf("services.%s.guard", s.Name), Location: feature.XDPLocation(device), Netns: s.Netns,
				Remedy: "omit interfaces of the guard: it then works at the sockets"})
		}
	}
	return out
}

// Empty implements feature.Emptier.
func (s State) Empty() bool { return len(s.Guards)+len(s.Unreadable) == 0 }
