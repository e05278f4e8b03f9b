// SPDX-License-Identifier: Apache-2.0

// Package suggest finds the intended name of a misspelled one.
package suggest

import "strings"

// Nearest returns the most likely name for a misspelled one, "" if none is similar.
func Nearest(s string, names []string) string {
	best, least := "", 0
	for _, name := range names {
		// Ignore case and the kind of dash.
		n := distance(fold(s), fold(name))
		// A third of the letters may be wrong, at least one, but not all.
		if n > max(1, max(len(s), len(name))/3) || n >= min(len(s), len(name)) && n > 0 {
			continue
		}
		if best == "" || n < least {
			best, least = name, n
		}
	}
	return best
}

func fold(s string) string {
	const longest = 64 // longer text is no misspelled key
	if len(s) > longest {
		s = s[:longest]
	}
	return strings.ReplaceAll(strings.ToLower(s), "-", "_")
}

// distance returns the number of letters to insert, remove, replace or swap with their neighbour to
// turn a into b (optimal string alignment).
func distance(a, b string) int {
	before, last := make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range last {
		last[j] = j
	}
	for i := 1; i <= len(a); i++ {
		row := make([]int, len(b)+1)
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			row[j] = min(last[j]+1, row[j-1]+1, last[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				row[j] = min(row[j], before[j-2]+1)
			}
		}
		before, last = last, row
	}
	return last[len(b)]
}
