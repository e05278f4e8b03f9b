// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"slices"
	"strings"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/inventory"
)

var _ feature.Suggester = Feature{}

// Suggest implements feature.Suggester: a guard that only counts, for UDP servers.
func (Feature) Suggest(h inventory.Host) (out []feature.Suggestion) {
	for _, p := range h.Programs {
		if p.Local() || !p.Has("udp") || !slices.Contains([]inventory.Role{inventory.DNS, inventory.Web, inventory.Other}, p.Role) {
			continue
		}
		s := feature.Suggestion{Service: p.Service, Text: "guard: {limit: 20kpps, dry_run: true}\n",
			Reason: []string{"In a flood of UDP, known clients go first. Watch weir guard status for a day, choose a limit above the",
				"usual peak, then remove dry_run."}}
		for _, n := range h.Namespaces {
			if n.Name == p.Netns && n.Rules != nil && len(n.Rules.Limits) > 0 {
				s.Reason = append(s.Reason, fmt.Sprintf("nftables limits UDP too: %s.", strings.Join(n.Rules.Limits, ", ")))
			}
		}
		out = append(out, s)
	}
	return out
}
