// SPDX-License-Identifier: Apache-2.0

package filtertest

import (
	"math/rand/v2"
	"testing"
	"time"
)

// Patterns, names and options, and rates.
func TestCosts(t *testing.T) {
	for _, h := range hooks {
		for name, k := range map[string]Kinds{"patterns": {Costs: true}, "rates": {Rates: true}} {
			t.Run(h.String()+"/"+name, func(t *testing.T) {
				needHook(t, h)
				seed := uint64(time.Now().UnixNano())
				r := rand.New(rand.NewPCG(seed, 4))
				var all Result
				for i := range 4 {
					res, err := Batch{Hook: h, Rules: 24, Packets: 400, Decide: i == 0, Kinds: k}.Run(r)
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
