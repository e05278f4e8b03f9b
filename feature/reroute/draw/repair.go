// SPDX-License-Identifier: Apache-2.0

package draw

import (
	"fmt"
	"strings"

	"github.com/weir-project/weir/feature/reroute/plan"
)

// Repair draws a row of an answer: the failure, the path before it, and the repair with its segments.
func Repair(a *plan.Answer, row plan.RepairRow) []byte {
	n, f := row.Plan.Network, row.Plan.Failures[row.Repair.Failure]
	s := Scene{Failed: f.Links, Gone: f.Node, Out: row.Repair.Out, After: a.Planner.Path(row.Plan.Node, row.Repair),
		Before: pathBefore(a.Planner, row, f)}
	for _, seg := range row.Repair.Segments {
		s.Segments = append(s.Segments, Stop{seg.Node, seg.Link})
	}
	list := "no segments"
	if len(row.Segments) > 0 {
		list = "segments " + strings.Join(row.Segments, ", ")
	}
	s.Title = []string{
		fmt.Sprintf("%s: %s to %s when %s fails", n.Name, row.Node, row.Destination, row.Failure),
		fmt.Sprintf("out over %s, %s; metric %d", row.Out, list, row.Metric),
	}
	return SVG(n, s)
}

// pathBefore returns the path broken by the failure: over one of the failed links.
func pathBefore(p *plan.Planner, row plan.RepairRow, f plan.Failure) []int {
	n := row.Plan.Network
	for _, l := range f.Local {
		rest := p.Native(n.Links[l].To, row.Repair.Destination)
		if rest != nil && p.Distance(row.Plan.Node, row.Repair.Destination) ==
			uint64(n.Links[l].Metric)+p.Distance(n.Links[l].To, row.Repair.Destination) {
			return append([]int{row.Plan.Node}, rest...)
		}
	}
	return nil
}
