// SPDX-License-Identifier: Apache-2.0

package quota

import (
	"testing"

	"github.com/weir-project/weir/feature/handoff/move"
)

func TestRoom(t *testing.T) {
	const table = 400
	r := &Reports{}
	fill := func(b move.Backend) (n int) {
		for r.Room(b, table) == nil {
			r.Add(b)
			n++
		}
		return n
	}
	if n := fill(1); n != 200 {
		t.Errorf("one backend has %d", n)
	}
	if n := fill(2); n != 100 {
		t.Errorf("another one has %d", n)
	}
	r.Begin()
	r.End(map[move.Backend]int{1: 150})
	if n, m := fill(1), fill(2); n != 50 || m != 100 {
		t.Errorf("after a count: %d and %d", n, m)
	}
}
