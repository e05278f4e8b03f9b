// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
	"golang.org/x/sys/unix"
)

// ServiceSection implements feature.ServiceSectioned: the steer section of a service.
func (Feature) ServiceSection() any { return new(spec.Options) }

// Spec implements feature.Feature. It returns the steered services. The steer section is optional, unless the service
// has another feature's section and no members.
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

var (
	_ feature.Runner        = Feature{}
	_ feature.Recoverer     = Feature{}
	_ feature.Examiner      = Feature{}
	_ feature.Measured      = Feature{}
	_ feature.RemovePlanner = Feature{}
)

// Recover implements feature.Recoverer.
func (Feature) Recover(l *kernel.WriteLock) error { return engine.Recover(l) }

// Collector implements feature.Measured.
func (Feature) Collector(r *kernel.Root) prometheus.Collector { return newCollector(r) }

// Examine implements feature.Examiner.
func (Feature) Examine(ctx context.Context, r *kernel.Root) ([]feature.Finding, error) {
	return examine(ctx, r)
}

var _ feature.Privileged = Feature{}

// Rights implements feature.Privileged.
func (Feature) Rights() []feature.Right {
	return []feature.Right{
		{Capability: unix.CAP_NET_RAW, For: "hear and replay templates (feature/steer/templates)"},
		{Capability: unix.CAP_SETUID, For: "ready.command as the member's user (service.Ready), sockets of this user (sockholder.newUserSocket)"},
		{Capability: unix.CAP_SETGID, For: "ready.command with the member's groups (service.Ready)"},
		{Capability: unix.CAP_SETPCAP, For: "ready.command of a member of root without capabilities beyond the member's (users.Confine)"},
		{Capability: unix.CAP_KILL, For: "end a ready.command (service.endGroup), signal the socket holder of a group (engine.PokeSocketHolder)"},
	}
}
