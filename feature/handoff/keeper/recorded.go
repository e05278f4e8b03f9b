// SPDX-License-Identifier: Apache-2.0

package keeper

import "github.com/weir-project/weir/kernel"

// PinnedMaps implements feature.Recorded.
func (Feature) PinnedMaps(i kernel.Instance) (names []string, ok bool) { return nil, i == pinnedLimits }
