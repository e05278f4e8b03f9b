// SPDX-License-Identifier: Apache-2.0

package spec

import "slices"

// Assign is the table of a new service: every bucket's slot, slots differing by
// one bucket at most.
func Assign(slots int) []uint16 {
	table := make([]uint16, Buckets)
	for i := range Buckets {
		// 2053 is odd: a permutation, so that what a slot gives away later is spread over the table.
		table[i*2053%Buckets] = uint16(i * slots / Buckets)
	}
	return table
}

// Rebalance is the table that follows from another when the number of slots or
// their weights change: every slot gets its share of buckets, and no bucket
// moves that need not. From n slots to n+1 that is one of n+1 buckets. A slot
// without a weight has weight 1; one of weight 0 gets no bucket.
func Rebalance(table []uint16, slots int, weights ...int) []uint16 {
	held := make([][]int, slots) // buckets, by slot
	var free []int               // of slots that are gone
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

// Permutation is the order in which Rebalance goes through the buckets.
var Permutation = func() (p [Buckets]int) {
	for i := range p {
		p[i] = i * 2053 % Buckets
	}
	return p
}()

// Shares divides the buckets by weight. What the division leaves goes to slots
// that would otherwise have to give buckets away, then to the first ones.
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
		weights, total = nil, slots // nobody is to have any: all are alike then
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
