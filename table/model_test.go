// SPDX-License-Identifier: Apache-2.0

package table

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

// model is the reference: a plain map of prefixes.
type model map[netip.Prefix]uint32

func (m model) lookup(a netip.Addr) uint32 {
	for l := a.BitLen(); l >= 0; l-- {
		p, _ := a.Prefix(l)
		if v, ok := m[p]; ok {
			return v
		}
	}
	return 0
}

// onHeap returns a table without maps, for tests without a kernel.
func onHeap(t testing.TB, segments int) *Table {
	t.Helper()
	return &Table{newMemory(segments)}
}

// shape is a distribution of prefixes.
type shape struct {
	name string
	draw func(r *rand.Rand, known []netip.Prefix) netip.Prefix
}

func random4(r *rand.Rand) netip.Addr {
	v := r.Uint32()
	return netip.AddrFrom4([4]byte{byte(v >> 24), byte(v >> 16), byte(v >> 8), byte(v)})
}

func random6(r *rand.Rand) netip.Addr {
	var b [16]byte
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return netip.AddrFrom16(b)
}

func prefixAt(a netip.Addr, bits int) netip.Prefix {
	p, err := a.Prefix(bits)
	if err != nil {
		panic(err)
	}
	return p
}

// near returns an address sharing many bits with a.
func near(r *rand.Rand, a netip.Addr) netip.Addr {
	b := a.AsSlice()
	for range 1 + r.IntN(2) {
		i := r.IntN(len(b) * 8)
		b[i/8] ^= 1 << (7 - i%8)
	}
	out, _ := netip.AddrFromSlice(b)
	return out
}

var shapes = []shape{
	{"random4", func(r *rand.Rand, _ []netip.Prefix) netip.Prefix { return prefixAt(random4(r), r.IntN(33)) }},
	{"random6", func(r *rand.Rand, _ []netip.Prefix) netip.Prefix { return prefixAt(random6(r), r.IntN(129)) }},
	{"nested4", func(r *rand.Rand, known []netip.Prefix) netip.Prefix {
		a := netip.AddrFrom4([4]byte{10, byte(r.IntN(2)), byte(r.IntN(4)), byte(r.IntN(256))})
		if len(known) > 0 && r.IntN(4) > 0 {
			a = near(r, known[r.IntN(len(known))].Addr())
		}
		return prefixAt(a, r.IntN(33))
	}},
	{"nested6", func(r *rand.Rand, known []netip.Prefix) netip.Prefix {
		a := netip.MustParseAddr("2001:db8::")
		if len(known) > 0 && r.IntN(8) > 0 {
			a = near(r, known[r.IntN(len(known))].Addr())
		}
		return prefixAt(a, r.IntN(129))
	}},
	{"hosts4", func(r *rand.Rand, _ []netip.Prefix) netip.Prefix {
		return prefixAt(netip.AddrFrom4([4]byte{192, 0, 2 + byte(r.IntN(3)), byte(r.IntN(256))}), 28+r.IntN(5))
	}},
	{"one64", func(r *rand.Rand, _ []netip.Prefix) netip.Prefix {
		a := netip.MustParseAddr("2001:db8:1:2::").As16()
		a[15], a[14], a[8] = byte(r.IntN(16)), byte(r.IntN(4)), byte(r.IntN(2))
		return prefixAt(netip.AddrFrom16(a), 60+r.IntN(69))
	}},
	{"around32", func(r *rand.Rand, _ []netip.Prefix) netip.Prefix {
		a := [16]byte{0x20, 1, byte(r.IntN(4)), byte(r.IntN(64)), byte(r.IntN(3)) << 7}
		return prefixAt(netip.AddrFrom16(a), 28+r.IntN(8))
	}},
	{"dense4", func(r *rand.Rand, _ []netip.Prefix) netip.Prefix {
		a := netip.AddrFrom4([4]byte{172, byte(r.IntN(2)), byte(r.IntN(256)), byte(r.IntN(4)) << 6})
		return prefixAt(a, []int{24, 24, 24, 24, 24, 24, 26, 20, 17, 12, 32}[r.IntN(11)])
	}},
	{"dense6", func(r *rand.Rand, _ []netip.Prefix) netip.Prefix {
		a := [16]byte{0x20, 1, 0, byte(r.IntN(2)), byte(r.IntN(16)), byte(r.IntN(256)), byte(r.IntN(2))}
		return prefixAt(netip.AddrFrom16(a), []int{48, 48, 48, 48, 48, 48, 44, 49, 36, 32, 30, 56}[r.IntN(12)])
	}},
	{"groups", func(r *rand.Rand, _ []netip.Prefix) netip.Prefix {
		a := [16]byte{0x20, 1, byte(r.IntN(16)), byte(r.IntN(256)), byte(r.IntN(2))}
		return prefixAt(netip.AddrFrom16(a), []int{20, 24, 32, 33, 40, 48}[r.IntN(6)])
	}},
}

// probes returns addresses at and around the bounds of a prefix.
func probes(r *rand.Rand, p netip.Prefix) []netip.Addr {
	first := p.Addr()
	b := first.AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 1 << (7 - i%8)
	}
	last, _ := netip.AddrFromSlice(b)
	out := []netip.Addr{first, last, near(r, first)}
	for _, a := range []netip.Addr{first.Prev(), last.Next()} {
		if a.IsValid() {
			out = append(out, a)
		}
	}
	return out
}

// checkAll compares the results of all queries with the model.
func checkAll(t *testing.T, tab *Table, m model) {
	t.Helper()
	found := model{}
	for e := range tab.All() {
		if _, twice := found[e.Prefix]; twice {
			t.Fatalf("%s comes twice", e.Prefix)
		}
		found[e.Prefix] = e.Value
	}
	for p, v := range m {
		if found[p] != v {
			t.Fatalf("%s has %d, want %d", p, found[p], v)
		}
		if got, ok := tab.Get(p); !ok || got != v {
			t.Fatalf("Get(%s) = %d, %v, want %d", p, got, ok, v)
		}
	}
	if len(found) != len(m) || tab.Len() != len(m) {
		t.Fatalf("%d prefixes, Len is %d, want %d", len(found), tab.Len(), len(m))
	}
}

// checkMemory checks that every unit is used by one page, free or in limbo.
func checkMemory(t *testing.T, tab *Table) {
	t.Helper()
	m := tab.m
	pages, units, groups := m.Pages, m.Units, m.Groups
	m.repair()
	if m.Pages != pages || m.Units != units || m.Groups != groups {
		t.Fatalf("%d pages of %d units, %d groups; really %d of %d, %d", pages, units, groups, m.Pages, m.Units, m.Groups)
	}
}

// TestAgainstModel compares a table with the model under random changes.
func TestAgainstModel(t *testing.T) {
	steps := 30000
	if testing.Short() {
		steps = 4000
	}
	for _, s := range shapes {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			seed := rand.Uint64()
			r := rand.New(rand.NewPCG(seed, 0))
			tab, m := onHeap(t, 4), model{}
			defer func() {
				if t.Failed() {
					t.Logf("seed %d", seed)
				}
			}()
			var known []netip.Prefix
			for i := range steps {
				p := s.draw(r, known)
				if len(known) > 0 && r.IntN(2) == 0 {
					p = known[r.IntN(len(known))]
				}
				if r.IntN(5) < 2 {
					_, was := m[p]
					existed, err := tab.Delete(p)
					if err != nil || existed != was {
						t.Fatalf("step %d: Delete(%s) = %v, %v, want %v", i, p, existed, err, was)
					}
					delete(m, p)
				} else {
					v := 1 + r.Uint32N(1000)
					if err := tab.Set(p, v); err != nil {
						t.Fatalf("step %d: Set(%s): %v", i, p, err)
					}
					if m[p] = v; len(known) < 2000 {
						known = append(known, p)
					}
				}
				for _, a := range probes(r, p) {
					if got, _ := tab.Lookup(a); got != m.lookup(a) {
						t.Fatalf("step %d, after %s: Lookup(%s) = %d, want %d", i, p, a, got, m.lookup(a))
					}
				}
				if i%5000 == 4999 {
					checkAll(t, tab, m)
					checkMemory(t, tab)
				}
			}
			checkAll(t, tab, m)
			for p := range m {
				if _, err := tab.Delete(p); err != nil {
					t.Fatal(err)
				}
			}
			checkAll(t, tab, model{})
			checkMemory(t, tab)
			if st := tab.Stats(); st.Pages != 0 || st.PageBytes != 0 {
				t.Errorf("an empty table has %+v", st)
			}
		})
	}
}

// hasFan reports whether an index entry leads to a fan.
func (m *memory) hasFan() bool {
	leads := func(e uint32) bool { return isPage(e) && m.isFan(of(e)) }
	return slices.ContainsFunc(m.index[m.active4()].Root4[:], leads) || slices.ContainsFunc(m.index[m.active6()].Slot[:], leads)
}

// mutate changes a table and its model, and compares them after each change.
func mutate(t *testing.T, r *rand.Rand, tab *Table, m model, s shape, known []netip.Prefix, steps int) {
	t.Helper()
	for i := range steps {
		p := s.draw(r, known)
		if r.IntN(2) == 0 {
			p = known[r.IntN(len(known))]
		}
		var err error
		if r.IntN(2) == 0 {
			_, err = tab.Delete(p)
			delete(m, p)
		} else {
			m[p] = 1 + r.Uint32N(1000)
			err = tab.Set(p, m[p])
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range probes(r, p) {
			if got, _ := tab.Lookup(a); got != m.lookup(a) {
				t.Fatalf("step %d, after %s: Lookup(%s) = %d, want %d", i, p, a, got, m.lookup(a))
			}
		}
	}
	checkAll(t, tab, m)
	checkMemory(t, tab)
}

// TestReplace checks that a table built at once equals one built step by step.
func TestReplace(t *testing.T) {
	for _, s := range shapes {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			seed := rand.Uint64()
			defer func() {
				if t.Failed() {
					t.Logf("seed %d", seed)
				}
			}()
			r := rand.New(rand.NewPCG(seed, 0))
			tab := onHeap(t, 8)
			rounds, steps := 3, 4000
			if testing.Short() {
				rounds, steps = 2, 800
			}
			for range rounds {
				m, all, known := model{}, []Entry(nil), []netip.Prefix(nil)
				for range 5000 {
					p := s.draw(r, known)
					e := Entry{p, 1 + r.Uint32N(MaxValue)}
					m[p], all, known = e.Value, append(all, e), append(known, p)
				}
				if err := tab.Replace(all); err != nil {
					t.Fatal(err)
				}
				checkAll(t, tab, m)
				checkMemory(t, tab)
				for _, p := range known {
					for _, a := range probes(r, p) {
						if got, _ := tab.Lookup(a); got != m.lookup(a) {
							t.Fatalf("Lookup(%s) = %d, want %d", a, got, m.lookup(a))
						}
					}
				}
				if strings.HasPrefix(s.name, "dense") && !tab.m.hasFan() {
					t.Error("so many neighbours, and no fan")
				}
				mutate(t, r, tab, m, s, known, steps)
			}
			all := slices.Collect(tab.All())
			for _, e := range all {
				if existed, err := tab.Delete(e.Prefix); err != nil || !existed {
					t.Fatal(e, existed, err)
				}
			}
			checkAll(t, tab, model{})
			if st := tab.Stats(); st.PageBytes != 0 {
				t.Errorf("an empty table has %+v", st)
			}
		})
	}
}

// TestHostsTakeLittle checks that scattered hosts share pages. A nearly empty array for them would
// not fit.
func TestHostsTakeLittle(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 5))
	for _, within := range []uint32{1 << 19, 1 << 22, 1 << 25, 1 << 30} {
		x := onHeap(t, 8)
		var entries []Entry
		for i := range uint32(1 << 18) {
			h := 10<<24 + r.Uint32N(within)
			entries = append(entries, Entry{netip.PrefixFrom(netip.AddrFrom4([4]byte{byte(h >> 24), byte(h >> 16), byte(h >> 8), byte(h)}), 32), i + 1})
		}
		if err := x.Replace(entries); err != nil {
			t.Errorf("%d hosts within %d addresses: %v", len(entries), within, err)
			continue
		}
		s := x.Stats()
		if each := s.PageBytes / s.IPv4; each > 20 {
			t.Errorf("%d hosts within %d addresses take %d bytes each", s.IPv4, within, each)
		}
		for _, e := range entries[len(entries)-1000:] {
			if v, ok := x.Get(e.Prefix); !ok || v < e.Value {
				t.Errorf("%s is %d, want %d", e.Prefix, v, e.Value)
			}
		}
	}
}

// newMemory returns the memory of a table without readers.
func newMemory(segments int) *memory {
	m := &memory{wait: func() {}, vacated: map[uint32]uint32{}, head: &head{}, index: [2]*index{{}, {}},
		pages: make([]byte, segments*(segmentBytes+slackBytes))}
	m.begin()
	return m
}
