// SPDX-License-Identifier: Apache-2.0

package guardstate

import (
	"cmp"
	"encoding/binary"
	"math"
	"net/netip"
	"slices"
)

// levels is enum guard_level in its order, with the prefix lengths of IPv4 and IPv6 sources.
var levels = []struct {
	name string
	bits [2]int
}{{"host", [2]int{32, 128}}, {"net", [2]int{24, 64}}, {"wide", [2]int{16, 48}}, {"port", [2]int{}}, {"destination", [2]int{}}}

const (
	topShift = 33 // GUARD_TOP_SHIFT
	topOne   = 16 // weight of one packet

	// topSpan converts a weight in packets into a rate. The weight is halved every 2^33 ns. On
	// average over the time between two halvings, a steady rate then has the weight of its packets
	// in 2^33 ns / ln 2.
	topSpan = (1 << topShift) / 1e9 / math.Ln2
	// topSample is the weight of one sample: one refused packet in 16 is recorded
	// (GUARD_TOP_SAMPLE).
	topSample = 16 * topOne
	// topLeast is the minimum number of samples of a pattern. With fewer, chance dominates.
	topLeast = 16
	shown    = 5 // patterns per level
)

// top returns the heaviest patterns of each level, the widest level first.
func (s *Layout) top(now uint64) []Pattern {
	var out []Pattern
	for level := range s.Top {
		var some []Pattern
		for i := range s.Top[level].Entry {
			for _, e := range s.Top[level].Entry[i] {
				if p, ok := s.pattern(level, i, e, uint32(now>>topShift)); ok {
					some = append(some, p)
				}
			}
		}
		slices.SortFunc(some, func(a, b Pattern) int {
			return cmp.Or(cmp.Compare(b.PPS, a.PPS), cmp.Compare(a.Prefix, b.Prefix), cmp.Compare(a.Port, b.Port))
		})
		out = append(out, some[:min(len(some), shown)]...)
	}
	return out
}

// pattern decodes an entry of a level's set. Entries are written without a lock. Two CPUs may tear
// one, so its check does not match its key. pattern skips such an entry.
func (s *Layout) pattern(level, set int, e TopEntry, now uint32) (Pattern, bool) {
	age := now - e.At
	if e.Weight == 0 || age > 31 {
		return Pattern{}, false
	}
	hash := s.topHash(level, e)
	if uint16(hash>>48) != e.Check || int(hash%uint64(len(s.Top[level].Entry))) != set {
		return Pattern{}, false
	}
	// Of hundreds of patterns, one is always well above its mean, and a table of the largest shows
	// it. So the rate is three standard deviations below the estimate.
	samples := float64(e.Weight>>age) / topSample
	p := Pattern{Level: levels[level].name, PPS: (samples - 3*math.Sqrt(samples)) * topSample / topOne / topSpan}
	address := netip.AddrFrom16(e.Address)
	switch p.Level {
	case "port":
		p.Port = NetworkOrder(e.Port)
	case "destination":
		p.Prefix = netip.AddrPortFrom(address.Unmap(), NetworkOrder(e.Port)).String()
	default:
		bits := levels[level].bits[1]
		if address.Is4In6() {
			address, bits = address.Unmap(), levels[level].bits[0]
		}
		p.Prefix = netip.PrefixFrom(address, bits).String()
	}
	return p, samples >= topLeast
}

// topHash is the hash of guard_file.
func (s *Layout) topHash(level int, e TopEntry) uint64 {
	seed := s.Total.Seed[0] + uint64(level)
	hi, lo := binary.NativeEndian.Uint64(e.Address[:]), binary.NativeEndian.Uint64(e.Address[8:])
	return mix(mix(hi^seed) ^ lo ^ uint64(e.Port))
}

// mix is guard_mix.
func mix(x uint64) uint64 {
	x ^= x >> 32
	x *= 0xd6e8feb86659fd93
	x ^= x >> 32
	x *= 0xd6e8feb86659fd93
	return x ^ x>>32
}

// checks that both sides have the same number of levels
var _ = [1]struct{}{}[len(Layout{}.Top)-5]
