// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"os"

	"github.com/weir-project/weir/kernel"
)

// A lookup that returns SK_DROP is answered with a reset or an ICMP error; what
// swallows a packet in silence is a socket whose filter drops everything. The
// holder has these for engine sk_lookup; for sk_reuseport, those of the groups do.

// Sinks is the number of entries of steer_sinks: families times protocols.
const Sinks = 4

// sinksThere says whether the sockets that swallow are all there; IPv6's may be
// missing where the host has none.
func sinksThere(pins *kernel.Opened) bool {
	need := Sinks
	if _, err := os.Stat("/proc/net/if_inet6"); err != nil {
		need = 2
	}
	for i := range uint32(need) {
		var cookie uint64
		if pins.Maps["sinks"].Lookup(i, &cookie) != nil {
			return false
		}
	}
	return true
}
