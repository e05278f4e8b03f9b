// SPDX-License-Identifier: Apache-2.0

// Package jhash is the Go version of bpf/hash.h.
package jhash

import (
	"encoding/binary"
	"math/bits"
	"net/netip"
)

// Addr returns the hash of an address with a seed: Jenkins' lookup3 over its 16 bytes as four words
// in memory order, IPv4 as v4-mapped.
func Addr(seed uint32, a netip.Addr) uint32 {
	k := a.As16()
	word := func(i int) uint32 { return binary.NativeEndian.Uint32(k[4*i:]) }
	rol := bits.RotateLeft32
	x := uint32(0xdeadbeef) + 4<<2 + seed
	p, q, r := x+word(0), x+word(1), x+word(2)
	p = p - r ^ rol(r, 4)
	r += q
	q = q - p ^ rol(p, 6)
	p += r
	r = r - q ^ rol(q, 8)
	q += p
	p = p - r ^ rol(r, 16)
	r += q
	q = q - p ^ rol(p, 19)
	p += r
	r = r - q ^ rol(q, 4)
	q += p
	p += word(3)
	r = (r ^ q) - rol(q, 14)
	p = (p ^ r) - rol(r, 11)
	q = (q ^ p) - rol(p, 25)
	r = (r ^ q) - rol(q, 16)
	p = (p ^ r) - rol(r, 4)
	q = (q ^ p) - rol(p, 14)
	r = (r ^ q) - rol(q, 24)
	return r
}
