// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"net/netip"

	"github.com/weir-project/weir/internal/jhash"
)

// Hash returns the hash of a source address: Jenkins' lookup3 over its 16 bytes as four words in memory order, IPv4 as
// v4-mapped. bpf/hash.h computes the same for the program.
func Hash(seed uint32, a netip.Addr) uint32 {
	return jhash.Addr(seed, a)
}

// Bucket returns the bucket of a source address.
func Bucket(seed uint32, a netip.Addr) int { return int(Hash(seed, a) & (Buckets - 1)) }
