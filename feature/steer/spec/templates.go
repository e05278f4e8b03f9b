// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"encoding"

	"github.com/weir-project/weir/internal/strictyaml"
	"golang.org/x/sys/unix"
)

// Templates controls whether the templates of a service's exporters are remembered and replayed.
type Templates string

// Values of templates.
const (
	TemplatesAuto Templates = "auto" // at UDP ports from 1024: lower ports carry DNS, QUIC, syslog and others
	TemplatesOn   Templates = "true"
	TemplatesOff  Templates = "false"
)

// UnmarshalText implements encoding.TextUnmarshaler.
func (t *Templates) UnmarshalText(b []byte) error {
	return strictyaml.Choice(t, b, "templates", TemplatesAuto, TemplatesOn, TemplatesOff)
}

var _ encoding.TextUnmarshaler = (*Templates)(nil)

// firstUserPort is the first port that needs no privilege. Flow collectors use ports from here.
const firstUserPort = 1024

// followable reports whether all messages of an exporter go to one member. Only then a replay reaches the receiver of
// its records.
func (p Policy) followable() bool { return p == "" || p == BySource || p == "device" }

// WantsTemplates reports whether templates sent to a UDP port of the service are remembered.
func (s Service) WantsTemplates(port uint16) bool {
	switch s.Templates {
	case TemplatesOff:
		return false
	case TemplatesOn:
		return true
	}
	return port >= firstUserPort && s.By.followable()
}

// checkTemplates returns the problem of the templates option, or "".
func (s Service) checkTemplates() string {
	if s.Templates != TemplatesOn {
		return ""
	}
	if !s.By.followable() {
		return "templates: true, but by: " + string(s.By) + " sends one exporter's messages to several members: use by: source or by: device"
	}
	for _, ep := range s.Endpoints() {
		if ep.Proto == unix.IPPROTO_UDP {
			return ""
		}
	}
	return "templates: true, but the service has no udp listen"
}
