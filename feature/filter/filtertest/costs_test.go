// SPDX-License-Identifier: Apache-2.0

package filtertest

import (
	"math/rand/v2"
	"testing"
	"time"
)

// Patterns, names, options and rates.
func TestCosts(t *testing.T) {
	for _, h := range hooks {
		for name, b := range map[string]Batch{"patterns": {Kinds: Kinds{Costs: true}}, "rates": {Kinds: Kinds{Rates: true}}, "rates-plain": {Kinds: Kinds{Rates: true}, Plain: true}} {
			t.Run(h.String()+"/"+name, func(t *testing.T) {
				needHook(t, h)
				seed := uint64(time.Now().UnixNano())
				r := rand.New(rand.NewPCG(seed, 4))
				var all Result
				for i := range rounds(4) {
					b.Hook, b.Rules, b.Packets, b.Decide = h, 24, 400, i == 0
					res, err := b.Run(r)
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
