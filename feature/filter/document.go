// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"slices"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/filter/suggest"
	"github.com/weir-project/weir/internal/inventory"
)

// Section implements feature.Sectioned: the list of filters.
func (Feature) Section() any { return new([]Filter) }

// Spec implements feature.Feature: the filters of the file.
func (Feature) Spec(d *feature.Document) (Config, bool) {
	filters, _ := feature.Section[[]Filter](d.Sections, Name)
	return Config{Filters: slices.Clone(filters)}, len(filters) > 0
}

// Claims implements feature.Claimer. XDP filters claim XDP of their interfaces.
func (Feature) Claims(c Config) (out []feature.Claim) {
	for _, f := range c.Filters {
		if f.Hook != HookXDP && f.Hook != HookXDPGeneric {
			continue
		}
		for _, device := range f.Interfaces {
			out = append(out, feature.Claim{Pos: f.Pos, Object: "filter." + f.Name, Location: feature.XDPLocation(device), Netns: f.Netns,
				Remedy: "use hook tcx or clsact for the filter"})
		}
	}
	return out
}

// Suggest implements feature.Suggester.
func (Feature) Suggest(h inventory.Host) []feature.Suggestion { return suggest.For(h) }

// Empty implements feature.Emptier.
func (s State) Empty() bool { return len(s.Filters)+len(s.Unreadable) == 0 }
