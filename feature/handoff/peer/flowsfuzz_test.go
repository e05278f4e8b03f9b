// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"slices"
	"testing"
)

// FuzzFlows checks that parsed records survive another round trip. They come from other agents.
func FuzzFlows(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte{flowsVersion, 1, 0, 0})
	f.Add(append([]byte{flowsVersion, 0, 0, 0}, make([]byte, 2*recordSize)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		records, last, err := ParseFlows(b)
		if err != nil {
			return
		}
		again, still, err := ParseFlows(AppendFlows(nil, records, last))
		if err != nil || still != last || !slices.Equal(again, records) {
			t.Errorf("%+v became %+v, %v", records, again, err)
		}
	})
}
