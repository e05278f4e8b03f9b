// SPDX-License-Identifier: Apache-2.0

package reroute

import (
	"github.com/weir-project/weir/feature"
	"golang.org/x/sys/unix"
)

var _ feature.Privileged = Feature{}

// Rights implements feature.Privileged.
func (Feature) Rights() []feature.Right {
	return []feature.Right{
		{Capability: unix.CAP_NET_RAW, For: "liveness probes, BFD packets (liveness, bfd/engine)"},
		{Capability: unix.CAP_DAC_OVERRIDE, For: "connect to sockets of FRR's user (bfd/dplane, audit)"},
	}
}
