// SPDX-License-Identifier: Apache-2.0

package feature

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
)

// Differences describes the changes between two lists of named objects of a kind: "session a added", "session b
// changed", and last the removed ones. The order does not matter.
func Differences[T comparable](kind string, was, want []T, name func(T) string) (out []string) {
	before := map[string]T{}
	for _, x := range was {
		before[name(x)] = x
	}
	for _, x := range want {
		o, had := before[name(x)]
		delete(before, name(x))
		if !had {
			out = append(out, fmt.Sprintf("%s %s added", kind, name(x)))
		} else if o != x {
			out = append(out, fmt.Sprintf("%s %s changed", kind, name(x)))
		}
	}
	for _, x := range was {
		if _, gone := before[name(x)]; gone {
			out = append(out, fmt.Sprintf("%s %s removed", kind, name(x)))
		}
	}
	return out
}

// KeyDifferences names the keys with different values in two configurations of one type: "devices changed". It omits the
// keys in but.
func KeyDifferences[C any](was, want *C, but ...string) (out []string) {
	a, b := reflect.ValueOf(was).Elem(), reflect.ValueOf(want).Elem()
	for i := range a.NumField() {
		key := a.Type().Field(i).Tag.Get("yaml")
		if key != "-" && !slices.Contains(but, key) && asText(a.Field(i).Interface()) != asText(b.Field(i).Interface()) {
			out = append(out, key+" changed")
		}
	}
	return out
}

// MapDifferences is [Differences] of two maps. name returns the name of an entry.
func MapDifferences[V any](kind string, was, want map[string]V, name func(key string, v V) string) []string {
	type entry struct{ name, text string }
	entries := func(of map[string]V) (out []entry) {
		for _, key := range slices.Sorted(maps.Keys(of)) {
			out = append(out, entry{name(key, of[key]), asText(of[key])})
		}
		return out
	}
	return Differences(kind, entries(was), entries(want), func(e entry) string { return e.name })
}

// asText encodes a configuration value for comparison.
func asText(v any) string {
	text, _ := json.Marshal(v) // plain values always encode
	return string(text)
}
