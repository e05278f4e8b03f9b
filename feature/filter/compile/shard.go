// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"fmt"
	"math/bits"
	"net/netip"

	"github.com/cilium/ebpf/asm"
)

// Shards spreads a list over tables by a hash of an address's first bits, because a table has at most 32 MiB.
// Prefixes shorter than these bits are in every table.
type Shards struct {
	Tables int `json:"tables"`          // a power of two, up to MaxShards; 0 is 1
	Bits4  int `json:"bits4,omitempty"` // hashed bits of an IPv4 address: 16, 24 or 32; 0: the first table has the whole family
	Bits6  int `json:"bits6,omitempty"` // hashed bits of an IPv6 address: 32, 48, 64 or 128; 0 likewise
}

// MaxShards is the maximum number of tables of a list: a program may have 64 maps, and a table has three.
const MaxShards = 8

// Odd multipliers for hashing.
const (
	shardHash = 0x9E3779B97F4A7C15
	shardLow  = 0xBF58476D1CE4E5B9
)

// Names returns the common prefix of each table's map names. first is the one of the first table.
func (s Shards) Names(first string) []string {
	out := []string{first}
	for i := 1; i < s.Tables; i++ {
		out = append(out, fmt.Sprintf("%ss%d", first, i))
	}
	return out
}

// shift returns the right shift from the hash to the table's number.
func (s Shards) shift() int { return 65 - bits.Len(uint(s.Tables)) }

// Find returns the index of a prefix's table, or -1 if it is in all of them.
func (s Shards) Find(p netip.Prefix) int {
	n := s.Bits6
	if p.Addr().Is4() {
		n = s.Bits4
	}
	switch {
	case s.Tables < 2 || n == 0:
		return 0
	case p.Bits() < n:
		return -1
	case p.Addr().Is4():
		a := p.Addr().As4()
		return int(uint64(be.Uint32(a[:])>>(32-n)) * shardHash >> s.shift())
	}
	a := p.Addr().As16()
	x := be.Uint64(a[:])
	if n < 64 {
		x = x >> (64 - n) << (64 - n)
	} else if n == 128 {
		x ^= be.Uint64(a[8:]) * shardLow
	}
	return int(x * shardHash >> s.shift())
}

// lookUp calls the lookup function of the table of an address in R1 and R2. n is the number of hashed bits.
func (g *gen) lookUp(name, fn string, s Shards, n int) {
	names := s.Names(name)
	if s.Tables < 2 || n == 0 {
		g.call(name + "_" + fn)
		return
	}
	g.Op(asm.Mov.Reg(asm.R3, asm.R1))
	switch {
	case fn == "four" && n < 32:
		g.Op(asm.RSh.Imm(asm.R3, int32(32-n)))
	case fn == "six" && n < 64:
		g.Op(asm.RSh.Imm(asm.R3, int32(64-n)), asm.LSh.Imm(asm.R3, int32(64-n)))
	case fn == "six" && n == 128:
		g.Op(asm.Mov.Reg(asm.R4, asm.R2), asm.LoadImm(asm.R5, wrap(shardLow), asm.DWord), asm.Mul.Reg(asm.R4, asm.R5), asm.Xor.Reg(asm.R3, asm.R4))
	}
	g.Op(asm.LoadImm(asm.R4, wrap(shardHash), asm.DWord), asm.Mul.Reg(asm.R3, asm.R4), asm.RSh.Imm(asm.R3, int32(s.shift())))
	found := g.Label()
	for i, table := range names[1:] {
		next := g.Label()
		g.Jump(asm.JNE.Imm(asm.R3, int32(i+1), ""), next)
		g.call(table + "_" + fn)
		g.GoTo(found)
		g.Bind(next)
	}
	g.call(name + "_" + fn)
	g.Bind(found)
}

// wrap converts a 64-bit number to a signed one.
func wrap(v uint64) int64 { return int64(v) }
