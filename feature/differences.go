// SPDX-License-Identifier: Apache-2.0

package feature

import "fmt"

// Differences says in words which things of one kind change between two lists of them, each with its name: "session a added",
// "session b changed", and at last those that are removed. An order alone is no difference.
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
