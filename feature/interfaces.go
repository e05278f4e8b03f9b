// SPDX-License-Identifier: Apache-2.0

package feature

import (
	"slices"
	"strings"

	"github.com/weir-project/weir/internal/strictyaml"
)

// Interfaces compares the interfaces of a published instance with those of a file.
type Interfaces struct {
	strictyaml.Pos                           // of the instance in the file
	Key             string                   // where the file has them: "filter.sip: interfaces"
	Published, Spec []string                 // of the published instance, and of the file
	Beside          string                   // where the published instance works without interfaces: "its sockets"; "": nowhere
	Works           func(name string) bool   // whether the published instance works at an interface of Published
	Lacks           func(name string) string // what keeps it from working at an interface of Spec; "": nothing
}

// Refuse adds an outage to a plan if the instance leaves a location where it works for interfaces at which it cannot: a misspelt name
// would take a running protection off. An interface of the published instance may be gone, and come back. One that is added to all
// others may come later.
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
	p.Outage("%v", i.Errorf("%s: it works at %s now, and would not at %s: %s: correct the name, or make this change once the interface is there",
		i.Key, strings.Join(left, ", "), strings.Join(absent, ", "), strings.Join(reasons, "; ")))
}
