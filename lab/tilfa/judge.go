// SPDX-License-Identifier: Apache-2.0

package tilfa

import (
	"context"
	"fmt"
	"slices"

	"github.com/weir-project/weir/feature/reroute/plan"
	"github.com/weir-project/weir/feature/reroute/topo"
	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/tilfa/sim"
)

// sum holds the results of one mode over all networks.
type sum struct {
	outcome  sim.Outcome
	failures int
	segments map[int]int // repairs by the length of their lists
	labels   map[int]int // for real networks, counted like in the original work
	cut      int         // destinations without a path
}

func newSum() *sum { return &sum{segments: map[int]int{}, labels: map[int]int{}} }

// network simulates all failures of one network.
func (x *experiment) network(ctx context.Context, n *topo.Network) error {
	s := sim.New(n)
	p := plan.New(n)
	for _, mode := range plan.Modes() {
		mine := newSum()
		plans, err := allPlans(p, n, mode)
		if err != nil {
			return fmt.Errorf("%s: %w", n.Name, err)
		}
		for _, pl := range plans {
			for _, r := range pl.Repairs {
				mine.segments[len(r.Segments)]++
				if x.real[n] {
					mine.labels[labels(n, r)]++
				}
			}
			mine.cut += len(pl.Unprotected)
		}
		repair := planned(plans)
		if x.env.Control {
			repair = s.Alternate
		}
		todo := failures(n, mode)
		for _, f := range todo {
			if err := ctx.Err(); err != nil {
				return err
			}
			o := s.Fail(f.Links, f.Node, repair)
			for i, e := range o.Examples {
				o.Examples[i] = say(n, f) + ": " + e
			}
			mine.outcome.Add(o)
			mine.failures++
		}
		var lfa sim.Outcome
		if mode == plan.Link {
			for _, f := range todo {
				lfa.Add(s.Fail(f.Links, f.Node, s.Alternate))
			}
		}
		x.mu.Lock()
		x.alternates.Add(lfa)
		x.sums[mode].add(mine)
		x.mu.Unlock()
	}
	return nil
}

// labels counts an adjacency segment of a remote router as two labels, the router's and the adjacency's,
// like segment routing over MPLS and the original work. With SRv6 it is one SID.
func labels(n *topo.Network, r plan.Repair) int {
	at, count := n.Links[r.Out].To, 0
	for _, s := range r.Segments {
		if count++; s.Link >= 0 && s.Node != at {
			count++
		}
		if at = s.Node; s.Link >= 0 {
			at = n.Links[s.Link].To
		}
	}
	return count
}

func allPlans(p *plan.Planner, n *topo.Network, mode plan.Mode) ([]*plan.Plan, error) {
	var out []*plan.Plan
	for i := range n.Nodes {
		pl, err := p.Plan(i, plan.Options{Mode: mode})
		if err != nil {
			return nil, err
		}
		out = append(out, pl)
	}
	return out, nil
}

// planned applies the routers' plans.
func planned(plans []*plan.Plan) sim.Repair {
	return func(router, link, destination int) (int, []plan.Segment, bool) {
		r, ok := plans[router].For(link, destination)
		if !ok {
			return 0, nil, false
		}
		return r.Out, r.Segments, true
	}
}

// failures lists the simulated failures: each cable once, or each interface on a LAN; each node; each
// group.
func failures(n *topo.Network, mode plan.Mode) (out []plan.Failure) {
	both := func(links []int) []int {
		for _, l := range slices.Clone(links) {
			links = append(links, n.Links[l].Reverse)
		}
		slices.Sort(links)
		return slices.Compact(links)
	}
	pick := func(node int, hit func(topo.Link) bool) {
		f := plan.Failure{Mode: mode, Node: node}
		for i, l := range n.Links {
			if hit(l) {
				f.Links = append(f.Links, i)
			}
		}
		f.Links = both(f.Links)
		out = append(out, f)
	}
	switch mode {
	case plan.Node:
		for i := range n.Nodes {
			pick(i, func(l topo.Link) bool { return l.From == i })
		}
	case plan.SRLG:
		for _, group := range n.SRLGs() {
			pick(-1, func(l topo.Link) bool { return slices.Contains(l.SRLGs, group) })
		}
	case plan.Link:
		lans := map[string]bool{}
		for i, l := range n.Links {
			if l.LAN != "" {
				if at := fmt.Sprint(l.From, l.LAN); !lans[at] {
					lans[at] = true
					pick(-1, func(o topo.Link) bool { return o.From == l.From && o.LAN == l.LAN })
				}
			} else if i < l.Reverse {
				out = append(out, plan.Failure{Mode: mode, Node: -1, Links: both([]int{i})})
			}
		}
	}
	return out
}

func (s *sum) add(o *sum) {
	s.outcome.Add(o.outcome)
	s.failures += o.failures
	s.cut += o.cut
	for k, v := range o.segments {
		s.segments[k] += v
	}
	for k, v := range o.labels {
		s.labels[k] += v
	}
}

// report sets the metrics of a mode.
func (s *sum) report(r *lab.Result, mode string) {
	o := s.outcome
	if o.Protectable > 0 {
		r.Set(mode+"_coverage", float64(o.Delivered)/float64(o.Protectable))
	}
	r.Set(mode+"_failures", float64(s.failures))
	r.Set(mode+"_pairs", float64(o.Pairs))
	r.Set(mode+"_affected", float64(o.Affected))
	r.Set(mode+"_cut", float64(o.Affected-o.Protectable))
	longest, all := lengths(r, "segments_"+mode, s.segments)
	r.Set("max_segments_"+mode, float64(longest))
	r.Set("repairs_"+mode, float64(all))
	if len(s.labels) > 0 {
		lengths(r, "real_labels_"+mode, s.labels)
	}
}

// lengths sets the share of repairs by list length.
func lengths(r *lab.Result, name string, counts map[int]int) (longest, all int) {
	for length, count := range counts {
		longest = max(longest, length)
		all += count
	}
	for length := range longest + 1 {
		r.Set(fmt.Sprintf("%s_%d_percent", name, length), 100*float64(counts[length])/float64(max(all, 1)))
	}
	return longest, all
}
