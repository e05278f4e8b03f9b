// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"github.com/weir-project/weir/feature"
	"golang.org/x/sys/unix"
)

var _ feature.Privileged = Feature{}

// Rights implements feature.Privileged.
func (Feature) Rights() []feature.Right {
	return []feature.Right{
		{Capability: unix.CAP_SYS_NICE, For: "priority while sessions move"},
	}
}
