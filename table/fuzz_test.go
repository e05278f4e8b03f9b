// SPDX-License-Identifier: Apache-2.0

package table

import (
	"net/netip"
	"testing"
)

// FuzzTable reads changes from bytes: family and operation, length, and an address of few bits, so
// prefixes often overlap.
func FuzzTable(f *testing.F) {
	f.Add([]byte{0, 24, 1, 2, 3, 0, 0, 0, 1, 1, 48, 1, 2, 3, 4, 5, 6, 7})
	f.Add([]byte{1, 128, 0, 0, 0, 0, 0, 0, 1, 1, 127, 0, 0, 0, 0, 0, 0, 1, 3, 128, 0, 0, 0, 0, 0, 0, 1})
	tab := onHeap(f, 2)
	f.Fuzz(func(t *testing.T, ops []byte) {
		m := model{}
		for ; len(ops) >= 9; ops = ops[9:] {
			op, bits, b := ops[0], int(ops[1]), ops[2:9]
			a := netip.AddrFrom4([4]byte(b))
			if op&1 > 0 {
				a = netip.AddrFrom16([16]byte{0: b[0] & 0x21, 1: b[1], 3: b[2], 5: b[3], 7: b[4], 9: b[5], 15: b[6]})
			}
			p := prefixAt(a, bits%(a.BitLen()+1))
			var err error
			if op&2 > 0 {
				_, err = tab.Delete(p)
				delete(m, p)
			} else {
				m[p] = 1 + uint32(op)
				err = tab.Set(p, m[p])
			}
			if err != nil {
				t.Fatal(err)
			}
			for q := range m {
				for _, a := range []netip.Addr{q.Addr(), q.Addr().Next(), q.Addr().Prev()} {
					if a.IsValid() && a.BitLen() == q.Addr().BitLen() {
						if got, _ := tab.Lookup(a); got != m.lookup(a) {
							t.Fatalf("after %s: Lookup(%s) = %d, want %d", p, a, got, m.lookup(a))
						}
					}
				}
			}
		}
		for p := range m {
			if _, err := tab.Delete(p); err != nil {
				t.Fatal(err)
			}
		}
		if st := tab.Stats(); st.PageBytes != 0 {
			t.Fatalf("an empty table has %+v", st)
		}
	})
}
