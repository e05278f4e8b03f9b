// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"slices"
	"testing"
)

// heldAndMoved returns the number of buckets per slot, and the number of buckets that differ from before.
func heldAndMoved(t testing.TB, before, table []uint16, slots int) (held []int, moved int) {
	t.Helper()
	held = make([]int, slots)
	for b, s := range table {
		if int(s) >= slots {
			t.Fatalf("bucket %d is slot %d's, of %d", b, s, slots)
		}
		held[s]++
		if s != before[b] {
			moved++
		}
	}
	return held, moved
}

func TestAssignIsBalanced(t *testing.T) {
	for n := 1; n <= MaxSlots; n++ {
		held, _ := heldAndMoved(t, Assign(n), Assign(n), n)
		if slices.Max(held)-slices.Min(held) > 1 {
			t.Fatalf("%d slots hold %d to %d buckets", n, slices.Min(held), slices.Max(held))
		}
	}
}

// TestRebalanceMovesOneShare adds and removes slots one by one. The table is always balanced, and the moved buckets do
// not exceed one slot's share.
func TestRebalanceMovesOneShare(t *testing.T) {
	table := Assign(1)
	step := func(n int, largest int) {
		t.Helper()
		next := Rebalance(table, n)
		held, moved := heldAndMoved(t, table, next, n)
		if slices.Max(held)-slices.Min(held) > 1 {
			t.Fatalf("%d slots hold %d to %d buckets", n, slices.Min(held), slices.Max(held))
		}
		if limit := (Buckets + largest - 1) / largest; moved > limit {
			t.Fatalf("to %d slots, %d buckets moved, more than %d", n, moved, limit)
		}
		if again := Rebalance(next, n); !slices.Equal(again, next) {
			t.Fatalf("%d slots are not settled", n)
		}
		table = next
	}
	for n := 2; n <= MaxSlots; n++ {
		step(n, n)
	}
	for n := MaxSlots - 1; n > 0; n-- {
		step(n, n+1)
	}
}

func FuzzRebalance(f *testing.F) {
	f.Add(4, 5, []byte{1, 1, 3})
	f.Add(3, 3, []byte{0, 0, 0})
	f.Add(2, 1, []byte{0, 9})
	f.Fuzz(func(t *testing.T, from, to int, w []byte) {
		if from < 1 || from > MaxSlots || to < 1 || to > MaxSlots || len(w) > to {
			return
		}
		weights := make([]int, len(w))
		total := to - len(w)
		for i, b := range w {
			weights[i] = int(b)
			total += int(b)
		}
		before := Assign(from)
		held, moved := heldAndMoved(t, before, Rebalance(before, to, weights...), to)
		must := 0 // buckets lost by the shrinking slots
		was, _ := heldAndMoved(t, before, before, from)
		for s, n := range was {
			if s >= to {
				must += n
			} else if n > held[s] {
				must += n - held[s]
			}
		}
		if moved != must {
			t.Fatalf("%d buckets moved, %d had to", moved, must)
		}
		for s, n := range held {
			if total == 0 {
				break
			}
			weight := 1
			if s < len(weights) {
				weight = weights[s]
			}
			if share := Buckets * weight / total; n != share && n != share+1 {
				t.Fatalf("slot %d of weight %d holds %d, not %d", s, weight, n, share)
			}
		}
	})
}
