// SPDX-License-Identifier: Apache-2.0

package tables

import (
	"fmt"
	"math/rand/v2"
	"net/netip"

	"github.com/weir-project/weir/table"
)

// toggle is a prefix with two alternating values; value 0 means absent.
type toggle struct {
	prefix netip.Prefix
	values [2]uint32
	state  int
}

// flip makes the update. It knows the old state, so it also checks the table's answer.
func (g *toggle) flip(t *table.Table) error {
	was := g.values[g.state]
	g.state ^= 1
	if v := g.values[g.state]; v != 0 {
		return t.Set(g.prefix, v)
	}
	existed, err := t.Delete(g.prefix)
	if err == nil && existed != (was != 0) {
		err = fmt.Errorf("delete %s: existed: %t, but its value was %d", g.prefix, existed, was)
	}
	return err
}

// probe is an address, its legal values, and the toggle selecting one of them; nil if only one value
// exists.
type probe struct {
	address netip.Addr
	legal   [2]uint32
	by      *toggle
	about   string
}

func (p probe) now() uint32 {
	if p.by == nil {
		return p.legal[0]
	}
	return p.legal[p.by.state]
}

// stage is the scenery of the readers: constant prefixes, prefixes changing under a probe, and prefixes
// changing beside one, in the same page or another.
type stage struct {
	fixed  []table.Entry
	seen   []*toggle
	beside []*toggle
	probes []probe
}

// arena is the address space of a stage, with its scenes.
type arena struct {
	space  netip.Prefix
	scenes []scene
	crowd  netip.Prefix // fills with neighbours and empties again, to split and merge pages
	bits   int          // their length
	strewn netip.Prefix // also fills and empties, with prefixes far from each other
}

// scene has a constant prefix, a changing one, and an address in both. One of them may be missing.
type scene struct {
	about         string
	stays         string
	changes       string
	appears       bool   // it appears and disappears, instead of changing its value
	inside, aside string // addresses within the changing prefix, and beside it
}

var arenas = map[family]arena{
	v4: {netip.MustParsePrefix("10.0.0.0/8"), []scene{
		{"a value changes", "", "10.1.1.0/24", false, "10.1.1.77", "10.1.2.1"},
		{"a prefix appears and disappears", "", "10.2.1.0/24", true, "10.2.1.255", "10.2.0.255"},
		{"a prefix within another", "10.3.0.0/18", "10.3.1.0/24", true, "10.3.1.0", "10.3.2.0"},
		{"a host within a /20", "10.4.16.0/20", "10.4.17.1/32", true, "10.4.17.1", "10.4.17.2"},
		{"the prefix around a constant one", "10.5.1.0/24", "10.5.0.0/18", true, "10.5.2.1", "10.5.1.1"},
		{"a short prefix over many pages", "10.18.1.0/24", "10.16.0.0/12", false, "10.30.1.1", "10.18.1.1"},
		{"a prefix of the index's width", "10.40.0.0/16", "10.40.0.0/17", true, "10.40.0.1", "10.40.128.1"},
		{"beside a crowd", "10.50.0.0/17", "10.50.127.0/24", false, "10.50.127.9", "10.50.126.9"},
	}, netip.MustParsePrefix("10.50.0.0/18"), 24, netip.MustParsePrefix("10.128.0.0/9")},
	v6: {netip.MustParsePrefix("3fff::/16"), []scene{
		{"a value changes", "", "3fff:1:1::/48", false, "3fff:1:1::77", "3fff:1:2::1"},
		{"the only prefix of a /32 appears and disappears", "", "3fff:2:1::/48", true, "3fff:2:1:ffff::1", "3fff:2:0:ffff::1"},
		{"a prefix within another", "3fff:3::/36", "3fff:3:1::/48", true, "3fff:3:1::", "3fff:3:2::"},
		{"a /64 within a /48", "3fff:4:1::/48", "3fff:4:1:2::/64", true, "3fff:4:1:2::1", "3fff:4:1:3::1"},
		{"a host within a /64", "3fff:5:1:1::/64", "3fff:5:1:1::5/128", true, "3fff:5:1:1::5", "3fff:5:1:1::4"},
		{"the prefix around a constant one", "3fff:6:1::/48", "3fff:6::/34", true, "3fff:6:2::1", "3fff:6:1::1"},
		{"a /32 itself", "3fff:7:1::/48", "3fff:7::/32", true, "3fff:7:2::1", "3fff:7:1::1"},
		{"a short prefix over many pages", "3fff:11:1::/48", "3fff:10::/28", false, "3fff:1f::1", "3fff:11:1::1"},
		{"beside a crowd", "3fff:50::/32", "3fff:50:ffff::/48", false, "3fff:50:ffff::9", "3fff:50:fffe::9"},
	}, netip.MustParsePrefix("3fff:50::/33"), 48, netip.MustParsePrefix("3fff:8000::/17")},
}

// stage draws the values, and the changing prefixes beside the scenes.
func (a arena) stage(r *rand.Rand) *stage {
	s := &stage{}
	for _, c := range a.scenes {
		s.add(c, r)
	}
	for _, within := range []netip.Prefix{a.crowd, a.strewn} {
		for i := range 64 {
			bits := a.bits + r.IntN(4)
			p := netip.PrefixFrom(nth(within, a.bits, i, r), bits)
			s.beside = append(s.beside, &toggle{prefix: p.Masked(), values: [2]uint32{0, value(r)}})
		}
	}
	return s
}

// nth returns the address of a prefix of this length, at most 64, within another. In a large space it is
// drawn, and different for different i.
func nth(within netip.Prefix, bits, i int, r *rand.Rand) netip.Addr {
	n, room := uint64(i), uint64(1)<<(bits-within.Bits())
	if room > 64 {
		n += r.Uint64N(room/64) * 64
	}
	words := append(addrWords(within.Addr()), 0)
	high := (uint64(words[0])<<32 | uint64(words[1])) | n<<(64-bits)
	words[0], words[1] = uint32(high>>32), uint32(high)
	if within.Addr().Is4() {
		return address(v4, words)
	}
	return address(v6, words)
}

func (s *stage) add(c scene, r *rand.Rand) {
	under, first, second := uint32(0), value(r), value(r)
	if c.stays != "" {
		under = value(r)
		s.fixed = append(s.fixed, table.Entry{Prefix: netip.MustParsePrefix(c.stays), Value: under})
	}
	g := &toggle{prefix: netip.MustParsePrefix(c.changes), values: [2]uint32{first, second}}
	if c.appears {
		g.values[1] = 0
	}
	s.fixed = append(s.fixed, table.Entry{Prefix: g.prefix, Value: first})
	s.seen = append(s.seen, g)

	inside, aside := netip.MustParseAddr(c.inside), netip.MustParseAddr(c.aside)
	in := probe{address: inside, legal: g.values, by: g, about: c.about}
	if c.appears && c.stays != "" && netip.MustParsePrefix(c.stays).Contains(inside) {
		in.legal[1] = under
	}
	s.probes = append(s.probes, in, probe{address: aside, legal: [2]uint32{under, under}, about: c.about + ": beside it"})
}
