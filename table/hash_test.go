// SPDX-License-Identifier: Apache-2.0

package table

import (
	"math/rand/v2"
	"testing"
)

// TestHashFindsSlots checks that nearly all /32s find a slot of their own in a hash five sixths
// full, for various distances between them. One in 500 may use the root. That happens to /32s
// differing only in their high bits. No registry assigns such ones.
func TestHashFindsSlots(t *testing.T) {
	r := rand.New(rand.NewPCG(6, 6))
	for name, key := range map[string]func(i uint32) uint32{
		"neighbours":      func(i uint32) uint32 { return 0x20010000 + i },
		"every 8th":       func(i uint32) uint32 { return 0x20000000 + i<<3 },
		"every 256th":     func(i uint32) uint32 { return 0x20000000 + i<<8 },
		"every 4096th":    func(i uint32) uint32 { return i << 12 },
		"high bits alone": func(i uint32) uint32 { return i << 15 },
		"two ends":        func(i uint32) uint32 { return i<<24 | i>>8 },
		"random":          func(uint32) uint32 { return r.Uint32() },
	} {
		for _, n := range []uint32{900, 10_000, 83_000, 110_000} {
			x := &index{}
			x.shape(int(n))
			seen := map[uint32]bool{}
			var groups []group
			for i := range n {
				if k := key(i); !seen[k] {
					seen[k] = true
					groups = append(groups, group{k, pageEntryFor(i + 1)})
				}
			}
			homeless := 0
			x.assignGroups(groups, func(int) { homeless++ })
			if homeless > len(groups)/500 {
				t.Errorf("%s: %d of %d keys find no slot", name, homeless, len(groups))
			}
			for _, g := range groups {
				if homeless == 0 && x.Slot[x.find(g.key)] != g.entry {
					t.Fatalf("%s: %d keys: %#x is not where it is looked for", name, n, g.key)
				}
			}
		}
	}
}
