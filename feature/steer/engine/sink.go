// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"os"

	"github.com/weir-project/weir/kernel"
)

// The kernel answers SK_DROP at a lookup with a reset or an ICMP error. Only a sink drops a packet silently: a socket
// with a filter that drops everything. The socket holder keeps the sinks of engine sk_lookup. For sk_reuseport, its
// sockets in the groups are sinks.

// Sinks is the number of entries of steer_sinks: families times protocols.
const Sinks = 4

// sinksThere reports whether all sinks exist. On a host without IPv6 the IPv4 sinks are enough.
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
