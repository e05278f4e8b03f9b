// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/weir-project/weir/lab"
)

// printResult prints the summary: claims, other findings, follow-ups.
func printResult(w io.Writer, r *lab.Result, x lab.Experiment) {
	fmt.Fprintf(w, "%s (%s), kernel %s, seed %d, %.0f s\n\n", r.Experiment, r.Size, r.Kernel, r.Seed, r.Metrics["seconds"])
	claimed := map[string]bool{}
	for _, c := range r.Claims {
		claimed[c.Metric] = true
		mark := "holds"
		if !c.OK {
			mark = "FAILS"
			if c.Kind == lab.Performance {
				mark = "short"
			}
		}
		fmt.Fprintf(w, "  %s  %s\n         %s = %s, wanted %s\n", mark, c.Claim, c.Metric, number(c.Got), c.Want)
	}
	fmt.Fprintln(w)
	column := 0
	for _, m := range slices.Sorted(maps.Keys(r.Metrics)) {
		if claimed[m] {
			continue
		}
		fmt.Fprintf(w, "  %-24s %10s", m, number(r.Metrics[m]))
		if column++; column%2 == 0 {
			fmt.Fprintln(w)
		}
	}
	if column%2 == 1 {
		fmt.Fprintln(w)
	}
	printNotes(w, r)
	if len(x.Next) > 0 {
		fmt.Fprintln(w, "\nTry next:")
		for _, n := range x.Next {
			fmt.Fprintln(w, "  "+n)
		}
	}
}

func printNotes(w io.Writer, r *lab.Result) {
	for _, s := range r.Skipped {
		fmt.Fprintln(w, "skipped:", s)
	}
	for _, n := range r.Notes {
		fmt.Fprintln(w, "note:", n)
	}
}

// number prints whole numbers without decimals, small ones such as ratios with three digits, others with
// one decimal.
func number(v float64) string {
	if v == float64(int64(v)) {
		return fmt.Sprintf("%d", int64(v))
	}
	if v > -10 && v < 10 {
		return fmt.Sprintf("%.3g", v)
	}
	return fmt.Sprintf("%.1f", v)
}
