// SPDX-License-Identifier: Apache-2.0

package table

import (
	"math/rand/v2"
	"testing"
)

// freePages returns the numbers in the lists of free pages.
func (m *memory) freePages() map[uint32]bool {
	free := map[uint32]bool{}
	for _, number := range m.Free {
		for ; number != 0; number = *m.word(number, 0) {
			free[number] = true
		}
	}
	return free
}

// TestGrace checks that a page is not rewritten while a reader may still read it.
func TestGrace(t *testing.T) {
	tab := onHeap(t, 1)
	m := tab.m
	waits := 0
	forbidden := map[uint32]bool{} // in limbo, without a grace period since
	m.wait = func() { waits++; clear(forbidden) }
	r := rand.New(rand.NewPCG(5, 5))
	for i := range 12000 {
		p := shapes[i%len(shapes)].draw(r, nil)
		if i%3 == 0 {
			if _, err := tab.Delete(p); err != nil {
				t.Fatal(err)
			}
		} else if err := tab.Set(p, 1+r.Uint32N(1000)); err != nil {
			t.Fatal(err)
		}
		for _, number := range m.Limbo[:m.InLimbo] {
			forbidden[number] = true
		}
		if i%20 > 0 {
			continue
		}
		free := m.freePages()
		for number := range forbidden {
			if free[number] {
				t.Fatalf("step %d: page %d is free without a grace period", i, number)
			}
		}
	}
	if waits == 0 {
		t.Error("memory was never used again: the test shows nothing")
	}
}
