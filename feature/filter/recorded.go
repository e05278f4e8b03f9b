// SPDX-License-Identifier: Apache-2.0

package filter

import "github.com/weir-project/weir/kernel"

// PinnedMaps implements feature.Recorded.
func (Feature) PinnedMaps(i kernel.Instance) (names []string, ok bool) {
	return []string{"base", "counts"}, i.Feature == Name && i.Scope != kernel.HostScope && kernel.ValidName(i.Name)
}
