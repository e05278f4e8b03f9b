// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"maps"
	"slices"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/filter/expr"
)

// warnOfEmptied warns of newly empty lists, as after a failed download. It reports an outage for a
// list of a pass rule with a later drop rule or default: the list passes nobody any more.
func (t *target) warnOfEmptied(plan *feature.Plan, was *published) {
	f := t.pub.Filter
	for _, name := range slices.Sorted(maps.Keys(t.pub.Lists)) {
		if t.pub.Lists[name].Entries > 0 || was != nil && was.Lists[name] != nil && was.Lists[name].Entries == 0 {
			continue
		}
		tell := plan.Warn
		if was != nil && was.Lists[name] != nil && f.passesBy(name) {
			tell = plan.Outage
		}
		tell("filter %s: list %s is empty: no packet matches $%s: check its file, %s", f.Name, name, name, f.Lists[name])
	}
}

// passesBy reports whether a rule passes packets by a list, with a drop rule or default after it.
func (f Filter) passesBy(list string) bool {
	for i, r := range f.Rules {
		if r.Action != Pass {
			continue
		}
		rule, err := r.parse()
		if err != nil {
			continue // reported elsewhere
		}
		asks := false
		expr.Walk(rule.Match.Root, func(n expr.Node) {
			in, ok := n.(*expr.In)
			asks = asks || ok && in.List == list
		})
		if asks && (f.Default == Drop || slices.ContainsFunc(f.Rules[i+1:], func(r Rule) bool { return r.Action == Drop })) {
			return true
		}
	}
	return false
}
