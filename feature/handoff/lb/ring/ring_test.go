// SPDX-License-Identifier: Apache-2.0

package ring

import "testing"

// TestRing checks that shares follow the weights, and a removed backend changes no other bucket.
func TestRing(t *testing.T) {
	hosts := []Share{{Number: 1, Name: "a", Weight: 1}, {Number: 2, Name: "b", Weight: 2}, {Number: 3, Name: "c", Weight: 1}, {Number: 4, Name: "d"}}
	all := New(hosts)
	share := map[uint16]int{}
	for _, h := range all {
		share[h]++
	}
	for host, want := range map[uint16]int{1: Buckets / 4, 2: Buckets / 2, 3: Buckets / 4, 4: 0} {
		if got := share[host]; got < want*9/10 || got > want*11/10 {
			t.Errorf("host %d has %d of %d buckets, want about %d", host, got, Buckets, want)
		}
	}
	for i, h := range New(hosts[:2]) {
		if all[i] != 3 && h != all[i] {
			t.Fatalf("bucket %d went from %d to %d", i, all[i], h)
		}
	}
}
