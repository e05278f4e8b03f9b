// SPDX-License-Identifier: Apache-2.0

package locate

import (
	"maps"
	"testing"
	"time"
)

// TestRivals checks the precedence at a location: the file's backend, the best proof, the data
// path's, the first one.
func TestRivals(t *testing.T) {
	here, elsewhere := Key{Interface: 7, MAC: [6]byte{2}}, Key{Interface: 8, MAC: [6]byte{2}}
	first, last := Found{Name: "first", Number: 2, Since: time.Unix(1, 0), At: here}, Found{Name: "last", Number: 1, Since: time.Unix(2, 0), At: here}
	known, named := Found{Name: "known", Number: 3, Since: time.Unix(3, 0), At: here}, Found{Name: "named", Number: 4, Named: true, Since: time.Unix(4, 0), At: here}
	own, partner := Found{Name: "own", Number: 6, Proof: ByOwn, Since: time.Unix(5, 0), At: here}, Found{Name: "partner", Number: 7, Proof: ByPartner, Since: time.Unix(6, 0), At: here}
	other := Found{Name: "other", Number: 5, At: elsewhere}
	for _, c := range []struct {
		all  []Found
		want map[uint16]string
	}{
		{[]Found{first, other}, map[uint16]string{}},
		{[]Found{last, first, other}, map[uint16]string{1: "first"}},
		{[]Found{last, first, known}, map[uint16]string{1: "known", 2: "known"}},
		{[]Found{last, known, partner}, map[uint16]string{1: "partner", 3: "partner"}},
		{[]Found{partner, own, known}, map[uint16]string{3: "own", 7: "own"}},
		{[]Found{own, named}, map[uint16]string{6: "named"}},
		{[]Found{named, last, first, known}, map[uint16]string{1: "named", 2: "named", 3: "named"}},
	} {
		if got := Rivals(c.all, func(Key) uint16 { return 3 }); !maps.Equal(got, c.want) {
			t.Errorf("%v: %v, want %v", c.all, got, c.want)
		}
	}
}
