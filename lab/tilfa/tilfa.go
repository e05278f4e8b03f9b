// SPDX-License-Identifier: Apache-2.0

// Package tilfa tests the planner of repairs. It simulates every single failure of a link, a node and a
// shared-risk group for every pair of routers, on real and generated networks. The simulator is independent
// of the planner.
package tilfa

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/weir-project/weir/feature/reroute/plan"
	"github.com/weir-project/weir/feature/reroute/topo"
	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/tilfa/sim"
)

func init() {
	lab.Register(lab.Experiment{
		Name:  "tilfa",
		Short: "repairs of every link, node and shared-risk failure, followed hop by hop",
		Run:   run,
		Next: []string{
			"weir-lab run tilfa --without-weir   the same claims for plain loop-free alternates (RFC 5286)",
			"weir reroute plan -f FILE --svg repair.svg   a plan for your own network, drawn",
		},
	})
}

// realFolder holds files of real networks on the authors' machines, relative to the project's root.
const realFolder = "../shared/data/topologies"

// experiment is one run.
type experiment struct {
	env    *lab.Env
	result *lab.Result
	nets   []*topo.Network
	real   map[*topo.Network]bool

	mu         sync.Mutex
	sums       map[plan.Mode]*sum
	alternates sim.Outcome // of plain loop-free alternates at link failures, for comparison
}

func run(ctx context.Context, e *lab.Env, r *lab.Result) error {
	x := &experiment{env: e, result: r, real: map[*topo.Network]bool{}, sums: map[plan.Mode]*sum{}}
	for _, m := range plan.Modes() {
		x.sums[m] = newSum()
	}
	real, err := realNetworks(e.Self())
	if err != nil {
		return err
	}
	x.nets = append(real, generated(e.Seed)...)
	for _, n := range real {
		x.real[n] = true
	}
	r.Set("topologies_real", float64(len(real)))
	if len(real) == 0 {
		r.Note("the real networks are missing on this machine: generated ones only")
	}
	for i, n := range x.nets {
		share(n, rand.New(rand.NewPCG(e.Seed, uint64(i))))
	}
	if e.Size != lab.Smoke {
		if err := x.time(ctx); err != nil {
			return err
		}
	}
	x.nets = slices.DeleteFunc(x.nets, func(n *topo.Network) bool { return len(n.Nodes) > nodes[e.Size] })
	if err := x.judge(ctx); err != nil {
		return err
	}
	if err := x.spread(ctx); err != nil {
		return err
	}
	x.report()
	x.claims()
	return nil
}

// spread tries the orders in which routers of the small networks can learn of a change.
func (x *experiment) spread(ctx context.Context) error {
	s := spreading{unstaged: map[bool]int{}}
	for _, n := range x.nets {
		if err := ctx.Err(); err != nil {
			return err
		}
		if len(n.Nodes) <= spreadNodes[x.env.Size] {
			x.env.Watch.Log("%s: every order of spreading changes", n.Name)
			spread(n, x.env.Rand, &s)
		}
	}
	x.result.Set("orders_packets", float64(s.moments))
	x.result.Set("orders_lost", float64(s.lost))
	x.result.Set("orders_lost_without_detours", float64(s.unstaged[false]+s.unstaged[true]))
	for _, e := range s.examples {
		x.result.Note("%s", e)
	}
	return nil
}

// spreadNodes limits the size of networks with tried orders.
var spreadNodes = map[lab.Size]int{lab.Full: 14, lab.Quick: 11, lab.Smoke: 6}

// nodes limits the size of simulated networks: the few large ones take most of the time. Planning is timed
// on the largest of all.
var nodes = map[lab.Size]int{lab.Full: 1 << 20, lab.Quick: 100, lab.Smoke: 64}

// realNetworks reads the files beside the project, if they exist.
func realNetworks(self string) ([]*topo.Network, error) {
	for _, root := range []string{".", filepath.Join(filepath.Dir(self), "..")} {
		var files []string
		for _, pattern := range []string{"sndlib/*.json", "zoo/*.graphml"} {
			found, err := filepath.Glob(filepath.Join(root, realFolder, pattern))
			if err != nil {
				return nil, err
			}
			files = append(files, found...)
		}
		var out []*topo.Network
		for _, file := range files {
			n, err := topo.ReadFile(file)
			if err != nil {
				return nil, err
			}
			out = append(out, n)
		}
		if len(out) > 0 {
			return out, nil
		}
	}
	return nil, nil
}

// judge simulates every network, two at a time.
func (x *experiment) judge(ctx context.Context) error {
	work := make(chan *topo.Network)
	errs := make(chan error, workers)
	for range workers {
		go func() {
			var first error
			for n := range work {
				if first == nil {
					first = x.network(ctx, n)
				}
			}
			errs <- first
		}()
	}
	for i, n := range x.nets {
		x.env.Watch.Log("%d of %d: %s, %d nodes, %d links", i+1, len(x.nets), n.Name, len(n.Nodes), len(n.Links)/2)
		work <- n
	}
	close(work)
	var all []error
	for range workers {
		all = append(all, <-errs)
	}
	return errors.Join(all...)
}

const workers = 2

// time measures a router's full plan: all three modes, all its links, all destinations, without earlier
// results.
func (x *experiment) time(ctx context.Context) error {
	largest := slices.MaxFunc(x.nets, func(a, b *topo.Network) int { return len(a.Nodes) - len(b.Nodes) })
	took := make([]time.Duration, 0, len(largest.Nodes))
	for node := range largest.Nodes {
		if err := ctx.Err(); err != nil {
			return err
		}
		begin := time.Now()
		p := plan.New(largest)
		for _, mode := range plan.Modes() {
			if _, err := p.Plan(node, plan.Options{Mode: mode}); err != nil {
				return err
			}
		}
		took = append(took, time.Since(begin))
	}
	slices.Sort(took)
	ms := func(q float64) float64 {
		return float64(took[min(len(took)-1, int(q*float64(len(took))))].Microseconds()) / 1000
	}
	x.result.Set("plan_nodes", float64(len(largest.Nodes)))
	x.result.Set("plan_links", float64(len(largest.Links)/2))
	x.result.Set("plan_ms_p50", ms(0.5))
	x.result.Set("plan_ms_p99", ms(0.99))
	return nil
}

func (x *experiment) report() {
	loops, fault, disturbed := 0, 0, 0
	for _, mode := range plan.Modes() {
		s := x.sums[mode]
		loops += s.outcome.Loops
		fault += s.outcome.UsedFault
		disturbed += s.outcome.Disturbed
		s.report(x.result, string(mode))
		for _, e := range s.outcome.Examples {
			x.result.Note("%s: %s", mode, e)
		}
	}
	if o := x.alternates; o.Protectable > 0 {
		x.result.Set("alternates_link_coverage", float64(o.Delivered)/float64(o.Protectable))
	}
	x.result.Set("topologies", float64(len(x.nets)))
	x.result.Set("loops", float64(loops))
	x.result.Set("used_failed", float64(fault))
	x.result.Set("disturbed", float64(disturbed))
}

func (x *experiment) claims() {
	r := x.result
	r.Claim(lab.Correctness, "number of networks", "topologies", ">= 30")
	r.Claim(lab.Correctness, "reached destinations with a path after a link failure", "link_coverage", "== 1")
	r.Claim(lab.Correctness, "the same after a node failure", "node_coverage", "== 1")
	r.Claim(lab.Correctness, "the same after a failure of all links of a shared-risk group", "srlg_coverage", "== 1")
	r.Claim(lab.Correctness, "no packet loops", "loops", "== 0")
	r.Claim(lab.Correctness, "no repaired packet is sent to the failed part", "used_failed", "== 0")
	r.Claim(lab.Correctness, "no other packet is disturbed", "disturbed", "== 0")
	r.Claim(lab.Correctness, "no order of learning a change loses a packet on a detour", "orders_lost", "== 0")
	r.Claim(lab.Correctness, "lists for links stay short", "max_segments_link", "<= 3")
	r.Claim(lab.Correctness, "lists for nodes stay short", "max_segments_node", "<= 4")
	if x.env.Size != lab.Smoke {
		r.Claim(lab.Performance, "a router plans fast", "plan_ms_p99", "<= 500")
	}
}

// say returns a description of a failure for the notes.
func say(n *topo.Network, f plan.Failure) string {
	if f.Mode == plan.Node {
		return fmt.Sprintf("%s without %s", n.Name, n.Nodes[f.Node].Name)
	}
	return fmt.Sprintf("%s without %s", n.Name, n.LinkName(f.Links[0]))
}
