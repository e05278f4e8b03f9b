// SPDX-License-Identifier: Apache-2.0

// Package handoffcompare compares the load balancer of handoff with HAProxy in TCP mode, its usual
// alternative, and with routing without either. It measures the latency of a request with its answer, and
// the throughput, with one to four servers.
package handoffcompare

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/weir-project/weir/lab"
)

func init() {
	lab.Register(lab.Experiment{
		Name:  "handoff-compare",
		Short: "the load balancer of handoff compared with HAProxy and plain routing: latency and throughput with 1 to 4 servers",
		Run:   run,
		Next: []string{
			"weir-lab run handoff-compare --quick --json   the findings for a program",
		},
	})
}

// plan holds the parameters of one size of the experiment.
type plan struct {
	servers []int         // numbers of servers, one after the other
	each    time.Duration // limit for new rounds with one number of servers
	rounds  int           // maximum, of all ways
	ping    time.Duration // of requests, for each way in each round
	bulk    time.Duration // of bulk transfer in each direction
	judged  bool          // include the performance claims
}

// Rounds are short and many, so all three ways of a round meet the same other load of the machine.
var plans = map[lab.Size]plan{
	lab.Full:  {servers: []int{1, 2, 3, 4}, each: time.Minute, rounds: 1000, ping: 60 * time.Millisecond, bulk: 100 * time.Millisecond, judged: true},
	lab.Quick: {servers: []int{1, 2, 3, 4}, each: 11 * time.Second, rounds: 1000, ping: 60 * time.Millisecond, bulk: 100 * time.Millisecond, judged: true},
	lab.Smoke: {servers: []int{2}, each: 4 * time.Second, rounds: 6, ping: 60 * time.Millisecond, bulk: 60 * time.Millisecond},
}

// connections is the number of parallel connections of each way, for any number of servers.
const connections = 8

// experiment is one run.
type experiment struct {
	plan
	env    *lab.Env
	result *lab.Result
	world  *world
	found  map[cell]*finding
}

// cell is one way with one number of servers.
type cell struct {
	way     string
	servers int
}

// finding holds the results of a cell, one value for each round.
type finding struct {
	latency  []time.Duration // of every request of all rounds
	p50      []float64       // µs
	up, down []float64       // Gbit/s
	answered map[int]int     // requests, by server
}

func run(ctx context.Context, e *lab.Env, r *lab.Result) error {
	if e.Control {
		return errors.New("handoff-compare has no control run: it already compares with plain routing")
	}
	x := &experiment{plan: plans[e.Size], env: e, result: r, found: map[cell]*finding{}}
	if err := r.WithStalls(func() error { return x.measure(ctx) }); err != nil {
		return err
	}
	x.report()
	x.claims()
	return nil
}

func (x *experiment) measure(ctx context.Context) error {
	var err error
	if x.world, err = newWorld(x.env, slices.Max(x.servers)); err != nil {
		return err
	}
	for _, n := range x.servers {
		if err := x.with(ctx, n); err != nil {
			return fmt.Errorf("with %d servers: %w", n, err)
		}
	}
	return nil
}

// with measures all ways with n servers, in turn.
func (x *experiment) with(ctx context.Context, n int) (err error) {
	ways, stop, err := x.world.ways(ctx, n)
	defer func() { err = errors.Join(err, stop()) }()
	if errors.Is(err, errNotInstalled) {
		if n == x.servers[0] {
			x.result.Skip("%v: no comparison of the load balancer with it", err)
		}
	} else if err != nil {
		return err
	}
	round := 0
	for end := time.Now().Add(x.each); round < x.rounds && time.Now().Before(end); round++ {
		x.env.Rand.Shuffle(len(ways), func(i, j int) { ways[i], ways[j] = ways[j], ways[i] })
		for _, w := range ways {
			if err := ctx.Err(); err != nil {
				return err
			}
			if err := x.turn(w, n); err != nil {
				return fmt.Errorf("%s: %w", w.name, err)
			}
		}
	}
	x.result.Set(fmt.Sprintf("rounds_%d", n), float64(round))
	for _, w := range ways {
		f := x.found[cell{w.name, n}]
		x.env.Watch.Log("%d servers, %-7s: %.1f µs, %.1f Gbit/s to the servers, %.1f Gbit/s from them (%d rounds)", n, w.name,
			median(f.p50), median(f.up), median(f.down), round)
	}
	return nil
}

// turn measures one way with n servers.
func (x *experiment) turn(w way, n int) error {
	p, err := x.world.ping(w, x.ping)
	if err != nil {
		return err
	}
	up, err := x.world.bulk(w, kindUp, x.bulk)
	if err != nil {
		return err
	}
	down, err := x.world.bulk(w, kindDown, x.bulk)
	if err != nil {
		return err
	}
	x.add("requests", float64(p.asked))
	x.add("wrong_answers", float64(p.wrong))
	x.add("bytes_moved", float64(up.sent+down.sent))
	x.add("bytes_lost", abs(float64(up.sent)-float64(up.received))+abs(float64(down.sent)-float64(down.received)))
	c := cell{w.name, n}
	f := x.found[c]
	if f == nil {
		f = &finding{answered: map[int]int{}}
		x.found[c] = f
	}
	for s, answers := range p.answered {
		f.answered[s] += answers
	}
	f.latency = append(f.latency, p.took...)
	p50, _, _ := lab.Percentiles(p.took)
	f.p50 = append(f.p50, micros(p50))
	f.up, f.down = append(f.up, up.gbits()), append(f.down, down.gbits())
	return nil
}

func (x *experiment) add(metric string, v float64) { x.result.Set(metric, x.result.Metrics[metric]+v) }

func micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1000 }

func abs(v float64) float64 { return max(v, -v) }
