// SPDX-License-Identifier: Apache-2.0

package feature

import (
	"slices"
	"testing"
)

func TestDifferences(t *testing.T) {
	type thing struct {
		name string
		size int
	}
	was := []thing{{"z", 1}, {"same", 2}, {"grows", 3}, {"a", 4}}
	want := []thing{{"new", 1}, {"grows", 5}, {"same", 2}}
	got := Differences("thing", was, want, func(x thing) string { return x.name })
	if w := []string{"thing new added", "thing grows changed", "thing z removed", "thing a removed"}; !slices.Equal(got, w) {
		t.Errorf("%q, want %q", got, w)
	}
	if got := Differences("thing", was, was, func(x thing) string { return x.name }); len(got) != 0 {
		t.Errorf("of the same: %q", got)
	}
}
