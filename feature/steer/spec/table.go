// SPDX-License-Identifier: Apache-2.0

package spec

import "slices"

// Assign returns the table of a new service: a slot for each bucket. The slots' shares differ by at most one bucket.
func Assign(slots int) []uint16 {
	table := make([]uint16, Buckets)
	for i := range Buckets {
		// 2053 is odd, so this is a permutation: buckets that a slot loses later are spread over the table.
		table[i*2053%Buckets] = uint16(i * slots / Buckets)
	}
	return table
}

// Rebalance returns the table for a changed number of slots or changed weights. Every slot gets its share of buckets,
// and the fewest possible buckets move: from n to n+1 slots one of n+1. The default weight is 1. A slot of weight 0
// gets no bucket.
func Rebalance(table []uint16, slots int, weights ...int) []uint16 {
	held := make([][]int, slots) // buckets, by slot
	var free []int               // of removed slots
	for _, b := range Permutation {
		if s := int(table[b]); s < slots {
			held[s] = append(held[s], b)
		} else {
			free = append(free, b)
		}
	}
	share := Shares(held, slots, weights)
	for s := range held {
		if n := len(held[s]) - share[s]; n > 0 {
			free = append(free, held[s][share[s]:]...)
		}
	}
	out := slices.Clone(table)
	for s := range held {
		for n := share[s] - len(held[s]); n > 0; n-- {
			out[free[0]] = uint16(s)
			free = free[1:]
		}
	}
	return out
}

// Permutation is the order of the buckets in Rebalance.
var Permutation = func() (p [Buckets]int) {
	for i := range p {
		p[i] = i * 2053 % Buckets
	}
	return p
}()

// Shares divides the buckets by weight. The remainder goes first to slots that would otherwise lose buckets, then to
// the lowest slots.
func Shares(held [][]int, slots int, weights []int) []int {
	weight := func(s int) int {
		if s < len(weights) {
			return weights[s]
		}
		return 1
	}
	total := 0
	for s := range slots {
		total += weight(s)
	}
	if total == 0 {
		weights, total = nil, slots // all weights are 0: treat the slots as equal
	}
	share := make([]int, slots)
	rest := Buckets
	for s := range slots {
		share[s] = Buckets * weight(s) / total
		rest -= share[s]
	}
	more := make([]bool, slots)
	for _, all := range []bool{false, true} {
		for s := 0; s < slots && rest > 0; s++ {
			if Buckets*weight(s)%total != 0 && !more[s] && (all || len(held[s]) > share[s]) {
				more[s] = true
				share[s]++
				rest--
			}
		}
	}
	return share
}
