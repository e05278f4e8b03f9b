// SPDX-License-Identifier: Apache-2.0

package tables

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/weir-project/weir/table"
)

func source() *rand.Rand { return rand.New(rand.NewPCG(1, 2)) }

// The prefixes of a set are different, masked, and equal for the same seed.
func TestPrefixes(t *testing.T) {
	for _, f := range []family{v4, v6} {
		for name, draw := range map[string]func(family, int, *rand.Rand) []table.Entry{"sparse": sparse, "dense": dense} {
			entries := draw(f, 10_000, source())
			seen := map[netip.Prefix]bool{}
			for _, e := range entries {
				p := e.Prefix
				if p != p.Masked() || p.Addr().BitLen() != f.bits() || seen[p] || e.Value < 1 || e.Value > table.MaxValue {
					t.Errorf("%s %s: %v is a duplicate, or no prefix with a value", f, name, e)
				}
				seen[p] = true
			}
			if len(entries) != 10_000 || !slices.Equal(entries, draw(f, 10_000, source())) {
				t.Errorf("%s %s: %d prefixes, or different ones for the same seed", f, name, len(entries))
			}
		}
	}
}

// Every key is within a prefix, and reaches each of a few. By rank the first has the most keys.
func TestKeysWithin(t *testing.T) {
	for f, texts := range map[family][]string{
		v4: {"10.0.0.0/8", "192.0.2.1/32", "198.51.100.0/22"},
		v6: {"2001:db8::/32", "2001:db9::1/128", "2001:dba:1::/47", "2001:dbb:1:1::/65"},
	} {
		var entries []table.Entry
		for _, text := range texts {
			entries = append(entries, table.Entry{Prefix: netip.MustParsePrefix(text).Masked(), Value: 1})
		}
		for _, ranked := range []bool{false, true} {
			keys := keysWithin(f, entries, ranked, source())
			hits := make([]int, len(entries))
			different := map[netip.Addr]bool{}
			for i := 0; i < len(keys); i += f.words() {
				a := address(f, keys[i:])
				in := slices.IndexFunc(entries, func(e table.Entry) bool { return e.Prefix.Contains(a) })
				if in < 0 {
					t.Fatalf("%s: %s is within none of %v", f, a, texts)
				}
				hits[in]++
				different[a] = true
			}
			if slices.Contains(hits, 0) || len(different) < keyCount/4 || ranked != (hits[0] > keyCount*2/5) {
				t.Errorf("%s, by rank %t: %d different keys, by prefix %v", f, ranked, len(different), hits)
			}
		}
	}
}

// Legal values of a stage match its prefixes, in any state of its toggles.
func TestStage(t *testing.T) {
	for f, a := range arenas {
		s := a.stage(source())
		for state := range 2 {
			held := map[netip.Prefix]uint32{}
			for _, e := range s.fixed {
				held[e.Prefix] = e.Value
			}
			for _, g := range append(slices.Clone(s.seen), s.beside...) {
				if !a.space.Overlaps(g.prefix) || g.prefix != g.prefix.Masked() {
					t.Errorf("%s: %s is not in %s", f, g.prefix, a.space)
				}
				g.state = state
				held[g.prefix] = g.values[state]
			}
			for _, p := range s.probes {
				best, value := -1, uint32(0)
				for prefix, v := range held {
					if v != 0 && prefix.Contains(p.address) && prefix.Bits() > best {
						best, value = prefix.Bits(), v
					}
				}
				if value != p.now() {
					t.Errorf("%s, state %d: %s is %d, legal is %d (%s)", f, state, p.address, value, p.now(), p.about)
				}
			}
		}
		if len(s.probes) > 64 {
			t.Errorf("%s: %d probes; bench.bpf.c has room for 64", f, len(s.probes))
		}
		beside := map[netip.Prefix]bool{}
		for _, g := range s.beside {
			beside[g.prefix] = true
		}
		if len(beside) != len(s.beside) {
			t.Errorf("%s: of %d prefixes beside the scenes only %d differ", f, len(s.beside), len(beside))
		}
	}
}
