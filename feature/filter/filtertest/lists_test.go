// SPDX-License-Identifier: Apache-2.0

package filtertest

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/filter/compile"
)

// Lists have the same members in code, in a table and in several tables.
func TestLists(t *testing.T) {
	for _, h := range hooks {
		for name, list := range map[string]compile.List{"inline": {}, "table": {Segments: 1}, "two tables": {Segments: 1, Shards: compile.Shards{Tables: 2, Bits4: 16, Bits6: 64}},
			"four tables": {Segments: 1, Shards: compile.Shards{Tables: 4, Bits4: 32, Bits6: 32}}, "eight tables": {Segments: 1, Shards: compile.Shards{Tables: 8, Bits6: 128}}} {
			t.Run(h.String()+"/"+name, func(t *testing.T) {
				needHook(t, h)
				seed := uint64(time.Now().UnixNano())
				r := rand.New(rand.NewPCG(seed, 3))
				var all Result
				for i := range 2 {
					res, err := Batch{Hook: h, Rules: 40, Packets: 300, Decide: i == 0, Kinds: Kinds{Lists: true}, Segments: list.Segments, Shards: list.Shards}.Run(r)
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
