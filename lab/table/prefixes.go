// SPDX-License-Identifier: Apache-2.0

package tables

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"

	"github.com/weir-project/weir/table"
)

// keyCount is the number of keys of a data set: KEYS in bench.bpf.c. Together they touch far more memory
// than a CPU's caches hold.
const keyCount = 1 << 20

// family is one address family. It names programs and maps, and sets the width of keys.
type family int

const (
	v4 family = 4
	v6 family = 6
)

func (f family) String() string {
	if f == v4 {
		return "v4"
	}
	return "v6"
}

// bits returns the length of an address, words the length of a key in 32-bit words.
func (f family) bits() int  { return map[family]int{v4: 32, v6: 128}[f] }
func (f family) words() int { return f.bits() / 32 }

// share is the frequency of a prefix length.
type share struct{ bits, weight int }

// mixes resemble the default-free routing tables of 2025, with a provider's own host routes added.
var mixes = map[family][]share{
	v4: {{24, 580}, {22, 110}, {23, 95}, {21, 50}, {20, 45}, {32, 40}, {19, 27}, {18, 14}, {16, 14}, {17, 9},
		{28, 6}, {29, 5}, {15, 2}, {14, 1}, {13, 1}, {12, 1}},
	v6: {{48, 480}, {32, 110}, {44, 80}, {40, 80}, {36, 40}, {64, 40}, {29, 30}, {46, 20}, {47, 20}, {42, 15},
		{45, 15}, {33, 15}, {56, 15}, {34, 10}, {35, 10}, {38, 10}, {128, 10}},
}

func draw(r *rand.Rand, mix []share) int {
	total := 0
	for _, s := range mix {
		total += s.weight
	}
	n := r.IntN(total)
	for _, s := range mix {
		if n -= s.weight; n < 0 {
			return s.bits
		}
	}
	return mix[0].bits
}

// sparse draws n different prefixes with the length mix of real tables.
func sparse(f family, n int, r *rand.Rand) []table.Entry {
	// Allocations of IPv6 are clustered: a registry assigns /32s, and their holders announce parts of them.
	blocks := make([]uint32, n/12+16)
	for i := range blocks {
		blocks[i] = 0x20000000 + r.Uint32N(0x0e000000)
	}
	seen := make(map[netip.Prefix]bool, n)
	entries := make([]table.Entry, 0, n)
	for len(entries) < n {
		words := [4]uint32{blocks[r.IntN(len(blocks))], r.Uint32(), r.Uint32(), r.Uint32()}
		if f == v4 {
			words[0] = 1<<24 + r.Uint32N(222<<24)
		}
		p := netip.PrefixFrom(address(f, words[:]), draw(r, mixes[f])).Masked()
		if !seen[p] {
			seen[p] = true
			entries = append(entries, table.Entry{Prefix: p, Value: value(r)})
		}
	}
	return entries
}

// dense lists n neighbours of one length, like a program's table of its own sites.
func dense(f family, n int, r *rand.Rand) []table.Entry {
	entries := make([]table.Entry, 0, n)
	for i := range uint32(n) {
		words, bits := [4]uint32{10<<24 + i<<8}, 24
		if f == v6 {
			words, bits = [4]uint32{0x20010000 + i>>16, i << 16}, 48
		}
		entries = append(entries, table.Entry{Prefix: netip.PrefixFrom(address(f, words[:]), bits), Value: value(r)})
	}
	return entries
}

func value(r *rand.Rand) uint32 { return 1 + r.Uint32N(table.MaxValue) }

// address converts words in host byte order to an address; IPv4 has one word.
func address(f family, words []uint32) netip.Addr {
	if f == v4 {
		var b [4]byte
		binary.BigEndian.PutUint32(b[:], words[0])
		return netip.AddrFrom4(b)
	}
	var b [16]byte
	for i := range 4 {
		binary.BigEndian.PutUint32(b[4*i:], words[i])
	}
	return netip.AddrFrom16(b)
}

// addrWords is the reverse of address.
func addrWords(a netip.Addr) []uint32 {
	b := a.AsSlice()
	words := make([]uint32, len(b)/4)
	for i := range words {
		words[i] = binary.BigEndian.Uint32(b[4*i:])
	}
	return words
}

// keysWithin draws addresses within prefixes, with equal probability for each prefix, or with zipf by rank:
// traffic goes to few destinations. The order of entries is random, so ranks are not neighbours.
func keysWithin(f family, entries []table.Entry, zipf bool, r *rand.Rand) []uint32 {
	pick := func() int { return r.IntN(len(entries)) }
	if zipf {
		z := rand.NewZipf(r, 1.1, 1, uint64(len(entries)-1))
		pick = func() int { return int(z.Uint64()) }
	}
	keys := make([]uint32, 0, keyCount*f.words())
	for range keyCount {
		p := entries[pick()].Prefix
		b := p.Addr().As16()
		if f == v4 {
			four := p.Addr().As4()
			copy(b[:], four[:])
		}
		for i := range f.words() {
			wildcard := uint32(uint64(1)<<min(max(32*(i+1)-p.Bits(), 0), 32) - 1)
			keys = append(keys, binary.BigEndian.Uint32(b[4*i:])|r.Uint32()&wildcard)
		}
	}
	return keys
}

// flipped flips one to three bits of each key: many are then outside their prefix, or in none.
func flipped(f family, keys []uint32, r *rand.Rand) []uint32 {
	out := make([]uint32, len(keys))
	copy(out, keys)
	for i := 0; i < len(out); i += f.words() {
		for range 1 + r.IntN(3) {
			bit := r.IntN(f.bits())
			out[i+bit/32] ^= 1 << (31 - bit%32)
		}
	}
	return out
}

// Sparse4 draws n different prefixes of IPv4 with the length mix of real tables, for other experiments.
func Sparse4(n int, r *rand.Rand) []table.Entry { return sparse(v4, n, r) }
