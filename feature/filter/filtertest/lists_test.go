// SPDX-License-Identifier: Apache-2.0

package filtertest

import (
	"math/rand/v2"
	"testing"
	"time"
)

// Lists have the same members in the code and in a table.
func TestLists(t *testing.T) {
	for _, h := range hooks {
		for name, segments := range map[string]int{"inline": 0, "table": 1} {
			t.Run(h.String()+"/"+name, func(t *testing.T) {
				needHook(t, h)
				seed := uint64(time.Now().UnixNano())
				r := rand.New(rand.NewPCG(seed, 3))
				var all Result
				for i := range 2 {
					res, err := Batch{Hook: h, Rules: 40, Packets: 300, Decide: i == 0, Kinds: Kinds{Lists: true}, Segments: segments}.Run(r)
					if err != nil {
						t.Fatalf("seed %d: %v", seed, err)
					}
					all.Add(res)
				}
				report(t, seed, all)
			})
		}
	}
}
