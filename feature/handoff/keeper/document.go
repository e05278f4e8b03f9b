// SPDX-License-Identifier: Apache-2.0

package keeper

import "github.com/weir-project/weir/feature"

// Under implements feature.Nested.
func (Feature) Under() string { return Name }

// Section implements feature.Sectioned: limits of the session keeper.
func (Feature) Section() any { return new(Limits) }

// Spec implements feature.Feature: the limits of the file.
func (Feature) Spec(d *feature.Document) (Limits, bool) {
	l, _ := feature.Section[Limits](d.Sections, FeatureName)
	return l, l.Pos.Line > 0 || !l.same(Limits{})
}
