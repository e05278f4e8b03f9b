// SPDX-License-Identifier: Apache-2.0

package feature

import (
	"slices"
	"strings"

	"github.com/weir-project/weir/internal/strictyaml"
)

// Interfaces compares the interfaces of a published instance with the interfaces in a file.
type Interfaces struct {
	strictyaml.Pos                           // of the instance in the file
	Key             string                   // location in the file: "filter.sip: interfaces"
	Published, Spec []string                 // interfaces of the published instance, and of the file
	Beside          string                   // where the published instance works without interfaces: "its sockets"; "": nowhere
	Works           func(name string) bool   // reports whether the published instance works at an interface of Published
	Lacks           func(name string) string // obstacle to working at an interface of Spec; "": none
}

// Refuse adds an outage to a plan if the instance would leave a working location for interfaces where it cannot work. A
// misspelt name would otherwise remove a running protection. A published interface may be missing and return later. An
// interface added to the existing ones may appear later.
func (i Interfaces) Refuse(p *Plan) {
	var left, absent, reasons []string
	if i.Beside != "" && len(i.Spec) > 0 {
		left = append(left, i.Beside)
	}
	for _, name := range i.Published {
		if !slices.Contains(i.Spec, name) && i.Works(name) {
			left = append(left, name)
		}
	}
	for _, name := range i.Spec {
		if slices.Contains(i.Published, name) {
			continue
		}
		if lack := i.Lacks(name); lack != "" {
			absent, reasons = append(absent, name), append(reasons, lack)
		}
	}
	if len(left) == 0 || len(absent) == 0 {
		return
	}
	p.Outage("%v", i.Errorf("%s: it works at %s now, and would not at %s: %s: correct the name, or make this change once the interface exists",
		i.Key, strings.Join(left, ", "), strings.Join(absent, ", "), strings.Join(reasons, "; ")))
}
