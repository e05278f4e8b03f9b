// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"encoding/binary"
	"net/netip"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/bfd/bfdtest"
)

// Packets to be discarded by RFC 5880 section 6.8.6 and RFC 5881 section 5 do not change a session. Packets without a
// session pass to other daemons of the host.
func TestRefused(t *testing.T) {
	const pass, taken = -1, 2 // TC_ACT_UNSPEC, TC_ACT_SHOT
	type counts struct{ in, malformed, notAuthentic uint64 }
	good, malformed, notAuthentic, nothing := counts{in: 1}, counts{malformed: 1}, counts{notAuthentic: 1}, counts{}
	for family, a := range map[string]struct {
		local, peer, other netip.Addr
		hops, at           int // offsets in a frame: hop limit, control packet
	}{
		"IPv4": {local4, peer4, netip.MustParseAddr("10.7.0.3"), 22, 42},
		"IPv6": {local6, peer6, netip.MustParseAddr("fe80::3"), 21, 62},
	} {
		t.Run(family, func(t *testing.T) {
			x := newPaceOf(t, a.local, a.peer, time.Second, 3)
			whole := frame(a.peer, a.local, bfdtest.HopLimit, x.p.Append(nil))
			state := func(s bfd.State) func(f []byte) { return func(f []byte) { f[a.at+1] = byte(s) << 6 } }
			yours := func(d uint32) func(f []byte) { return func(f []byte) { binary.BigEndian.PutUint32(f[a.at+8:], d) } }
			from := func(f []byte) { copy(f[a.at-8-2*len(a.other.AsSlice()):], a.other.AsSlice()) }
			for name, c := range map[string]struct {
				change  []func(f []byte)
				verdict int32
				counts
			}{
				"as it is":                     {nil, taken, good},
				"hop limit 254":                {[]func(f []byte){func(f []byte) { f[a.hops] = 254 }}, taken, malformed},
				"hop limit 1":                  {[]func(f []byte){func(f []byte) { f[a.hops] = 1 }}, taken, malformed},
				"from another":                 {[]func(f []byte){from}, taken, malformed},
				"to another":                   {[]func(f []byte){func(f []byte) { copy(f[a.at-8-len(a.other.AsSlice()):], a.other.AsSlice()) }}, taken, malformed},
				"version 0":                    {[]func(f []byte){func(f []byte) { f[a.at] = 0 }}, taken, malformed},
				"version 2":                    {[]func(f []byte){func(f []byte) { f[a.at] = 2 << 5 }}, taken, malformed},
				"too short by its length":      {[]func(f []byte){func(f []byte) { f[a.at+3] = 23 }}, taken, malformed},
				"longer than it is":            {[]func(f []byte){func(f []byte) { f[a.at+3] = 25 }}, taken, malformed},
				"multiplier 0":                 {[]func(f []byte){func(f []byte) { f[a.at+2] = 0 }}, taken, malformed},
				"multipoint":                   {[]func(f []byte){func(f []byte) { f[a.at+1] |= 1 }}, taken, malformed},
				"of no session of its own":     {[]func(f []byte){func(f []byte) { copy(f[a.at+4:], "\x00\x00\x00\x00") }}, taken, malformed},
				"poll and final":               {[]func(f []byte){func(f []byte) { f[a.at+1] |= 0x30 }}, taken, malformed},
				"authentication of none":       {[]func(f []byte){func(f []byte) { f[a.at+1] |= 4 }}, taken, malformed},
				"up, and does not know us":     {[]func(f []byte){yours(0)}, taken, malformed},
				"init, and does not know us":   {[]func(f []byte){yours(0), state(bfd.Init)}, taken, malformed},
				"to another session":           {[]func(f []byte){yours(x.s.Discriminator + 1)}, pass, nothing},
				"another, does not know us":    {[]func(f []byte){yours(0), state(bfd.Down), from}, pass, nothing},
				"to another port":              {[]func(f []byte){func(f []byte) { f[a.at-5]++ }}, pass, nothing},
				"a UDP length that is too low": {[]func(f []byte){func(f []byte) { f[a.at-3] = 8 + 23 }}, pass, nothing},
				"a key where there is none": {[]func(f []byte){func(f []byte) {
					f[a.at+1] |= 4
					f[a.at+3] = 52
					f[a.at-3] = 8 + 52
				}}, taken, notAuthentic},
			} {
				f := append([]byte{}, whole...)
				for _, change := range c.change {
					change(f)
				}
				if c.counts == notAuthentic {
					f = append(f, make([]byte, 28)...)
				}
				look := func() Status {
					st, _, err := x.w.status(0)
					if err != nil {
						t.Fatal(err)
					}
					return st
				}
				before := look()
				verdict, after := x.receive(f), look()
				got := counts{after.In - before.In, after.Malformed - before.Malformed, after.NotAuthentic - before.NotAuthentic}
				if verdict != c.verdict || got != c.counts || after.State != bfd.Up || after.Remote != before.Remote {
					t.Errorf("%s: verdict %d, want %d; counted %+v, want %+v; %+v", name, verdict, c.verdict, got, c.counts, after)
				}
			}
			// A restarted neighbour does not know us yet and reports down.
			f := append([]byte{}, whole...)
			yours(0)(f)
			state(bfd.Down)(f)
			if v := x.receive(f); v != taken {
				t.Errorf("verdict %d of who begins anew", v)
			}
			if st, _, err := x.w.status(0); err != nil || st.State != bfd.Down || st.Diag != bfd.NeighbourDown {
				t.Errorf("who begins anew: %+v, %v", st, err)
			}
		})
	}
}
