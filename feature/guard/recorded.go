// SPDX-License-Identifier: Apache-2.0

package guard

import "github.com/weir-project/weir/kernel"

// PinnedMaps implements feature.Recorded.
func (Feature) PinnedMaps(i kernel.Instance) (names []string, ok bool) {
	if i.Name == hooksName {
		names, ok = []string{pinListens, pinStates, pinEach}, true
	} else {
		names, ok = []string{pinState, pinEach}, kernel.ValidName(i.Name)
	}
	return names, ok && i.Feature == Name && i.Scope != kernel.HostScope
}
