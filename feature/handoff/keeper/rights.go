// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"github.com/weir-project/weir/feature"
)

var _ feature.Privileged = Feature{}

// Rights implements feature.Privileged.
func (Feature) Rights() []feature.Right {
	return []feature.Right{}
}
