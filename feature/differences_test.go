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

// Changes of a configuration are named by keys, and by entries of its maps.
func TestConfigDifferences(t *testing.T) {
	type part struct {
		Size int    `yaml:"size"`
		At   string `yaml:"at"`
	}
	type config struct {
		Position int             `yaml:"-"`
		Devices  []string        `yaml:"devices"`
		Name     string          `yaml:"name"`
		Parts    map[string]part `yaml:"parts"`
	}
	was := config{Position: 1, Devices: []string{"a"}, Name: "x", Parts: map[string]part{"big": {9, "l"}, "same": {1, "m"}, "gone": {2, "n"}}}
	want := config{Position: 2, Devices: []string{"a", "b"}, Name: "x", Parts: map[string]part{"big": {8, "l"}, "same": {1, "m"}, "new": {2, "n"}}}
	if got := KeyDifferences(&was, &want, "parts"); !slices.Equal(got, []string{"devices changed"}) {
		t.Errorf("keys: %q", got)
	}
	got := MapDifferences("part", was.Parts, want.Parts, func(key string, p part) string { return key + " at " + p.At })
	if w := []string{"part big at l changed", "part new at n added", "part gone at n removed"}; !slices.Equal(got, w) {
		t.Errorf("%q, want %q", got, w)
	}
}
