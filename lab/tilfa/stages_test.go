// SPDX-License-Identifier: Apache-2.0

package tilfa

import (
	"math/rand/v2"
	"testing"
)

// Routers switch to their detours, and leave them, in any order. All packets arrive in every such order, at
// a failure and at its end. Without detours many do not.
func TestNoOrderLoops(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	s := spreading{unstaged: map[bool]int{}}
	for _, n := range generated(3) {
		if len(n.Nodes) <= 12 {
			spread(n, r, &s)
		}
	}
	t.Logf("%d packets in all moments; without detours %d are lost after failures, %d on return", s.moments, s.unstaged[false], s.unstaged[true])
	for _, e := range s.examples {
		t.Error(e)
	}
	if s.moments < 100_000 || s.lost > 0 || s.unstaged[false] == 0 || s.unstaged[true] == 0 {
		t.Errorf("%+v: all should arrive, and some not without detours", s)
	}
}
