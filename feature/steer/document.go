// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/spec"
)

// ServiceSection implements feature.ServiceSectioned: steer in a service.
func (Feature) ServiceSection() any { return new(spec.Options) }

// Spec implements feature.Feature: the steered services. A service needs no steer section for that, unless it has
// another feature's section and no members.
func (Feature) Spec(d *feature.Document) (spec.Config, bool) {
	out := spec.Config{Rate: d.Rate}
	for _, entry := range d.Services {
		s := spec.Service{Spec: entry.Spec}
		o, ok := feature.Section[spec.Options](entry.Sections, spec.Name)
		if !ok && len(entry.Sections) > 0 && len(s.Members) == 0 {
			continue
		}
		if s.Options = o; !ok {
			s.Options.Pos = s.Spec.Pos
		}
		out.Services = append(out.Services, s)
	}
	return out, len(out.Services) > 0
}
