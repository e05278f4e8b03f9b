// SPDX-License-Identifier: Apache-2.0

package feature

import "testing"

func TestOnce(t *testing.T) {
	var once, other Once
	for _, c := range []struct {
		labels []string
		first  bool
	}{{[]string{"dns", "a"}, true}, {[]string{"dns", "b"}, true}, {[]string{"dns", "a"}, false}, {[]string{"dnsa"}, true}, {[]string{"dn", "sa"}, true}} {
		if once.First(c.labels...) != c.first {
			t.Errorf("%q: want first %t", c.labels, c.first)
		}
	}
	if !other.First("dns", "a") {
		t.Error("two scrapes know of each other")
	}
}
