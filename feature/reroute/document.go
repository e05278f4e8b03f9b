// SPDX-License-Identifier: Apache-2.0

package reroute

import "github.com/weir-project/weir/feature"

// Section implements feature.Sectioned: the list of paths.
func (Feature) Section() any { return new([]Path) }

// Spec implements feature.Feature: the links of the file and their repairs.
func (Feature) Spec(d *feature.Document) (Config, bool) {
	paths, _ := feature.Section[[]Path](d.Sections, Name)
	return Config{Paths: paths}, len(paths) > 0
}

// Empty implements feature.Emptier.
func (s State) Empty() bool { return len(s.Paths)+len(s.Sessions)+len(s.BFD)+len(s.Unreadable) == 0 }
