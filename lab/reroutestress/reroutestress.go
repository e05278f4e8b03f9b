// SPDX-License-Identifier: Apache-2.0

// Package reroutestress compares weir's liveness, FRR's bfdd and BIRD on an overloaded host. They run
// between the same two routers, over parallel links without failures. Every down is a false alarm.
package reroutestress

import (
	"context"
	"fmt"
	"time"

	"github.com/weir-project/weir/lab"
)

func init() {
	lab.Register(lab.Experiment{
		Name:  "reroute-stress",
		Short: "false alarms of links without failures, on overloaded routers",
		Run:   run,
		Next: []string{
			"weir-lab run reroute-stress --quick --json   the findings for a program",
		},
	})
}

// plan holds the parameters of one size of the experiment.
type plan struct {
	each    time.Duration // of each kind of stress
	stopped time.Duration // with weir's processes stopped
	rounds  int           // of cost measurements; 0: none
	round   time.Duration // long, compared with the 10 ms units of /proc/stat
}

var plans = map[lab.Size]plan{
	lab.Full:  {each: time.Minute, stopped: 10 * time.Second, rounds: 40, round: time.Second},
	lab.Quick: {each: 6 * time.Second, stopped: 10 * time.Second, rounds: 32, round: time.Second},
	lab.Smoke: {each: 2 * time.Second, stopped: 10 * time.Second},
}

// experiment is one run.
type experiment struct {
	plan
	env    *lab.Env
	result *lab.Result
	world  *world
	peers  []*daemon // BFD daemons, two for each installed implementation
}

func run(ctx context.Context, e *lab.Env, r *lab.Result) error {
	x := &experiment{plan: plans[e.Size], env: e, result: r}
	err := r.WithStalls(func() error {
		if err := x.build(ctx); err != nil {
			return err
		}
		if err := x.stresses(ctx); err != nil {
			return err
		}
		return x.stop(ctx)
	})
	if err != nil {
		return err
	}
	if x.rounds > 0 {
		if err := x.cost(ctx); err != nil {
			return err
		}
	}
	x.claims()
	return nil
}

func (x *experiment) say(format string, a ...any) { x.env.Watch.Log(format, a...) }

// build creates the routers, and waits until every session is up.
func (x *experiment) build(ctx context.Context) (err error) {
	x.say("two routers with links without failures")
	if x.world, err = newWorld(x.env); err != nil {
		return err
	}
	if err := x.startBFD(); err != nil {
		return err
	}
	if err := x.world.configure(ctx); err != nil {
		return err
	}
	return x.waitUp(ctx)
}

// tally holds the downs so far.
type tally struct {
	weir map[string]float64 // by metric
	bfd  map[string]float64
}

func (x *experiment) count(ctx context.Context) (t tally, err error) {
	if t.weir, err = x.world.downs(ctx); err != nil {
		return t, err
	}
	t.bfd = map[string]float64{}
	for _, d := range x.peers {
		n, err := d.downs(ctx, x.env)
		if err != nil {
			return t, fmt.Errorf("read the downs of %s: %w", d.kind, err)
		}
		t.bfd[d.kind] += float64(n)
	}
	return t, nil
}

// stresses applies one kind of stress after the other to the host.
func (x *experiment) stresses(ctx context.Context) error {
	sum := tally{weir: map[string]float64{}, bfd: map[string]float64{}}
	for _, k := range kinds {
		before, err := x.count(ctx)
		if err != nil {
			return err
		}
		x.say("%s, for %s", k.about, x.each)
		if err := x.under(ctx, k, x.each, nil); err != nil {
			return err
		}
		after, err := x.count(ctx)
		if err != nil {
			return err
		}
		minutes := x.each.Minutes()
		for _, of := range []struct{ sum, before, after map[string]float64 }{{sum.weir, before.weir, after.weir}, {sum.bfd, before.bfd, after.bfd}} {
			for name, n := range of.after {
				d := n - of.before[name]
				of.sum[name] += d
				x.result.Set(name+"_"+k.name, d)
				x.result.Set(name+"_"+k.name+"_per_minute", d/minutes)
			}
		}
		if err := x.waitUp(ctx); err != nil {
			return err
		}
	}
	for _, of := range []map[string]float64{sum.weir, sum.bfd} {
		for name, n := range of {
			x.result.Set(name, n)
		}
	}
	return x.notes(ctx)
}

// notes adds explanations for a failed claim.
func (x *experiment) notes(ctx context.Context) error {
	lines, err := x.world.describe(ctx)
	for _, l := range lines {
		x.result.Note("%s", l)
	}
	return err
}

// stop stops weir's processes under stress: probes continue.
func (x *experiment) stop(ctx context.Context) error {
	before, err := x.world.downs(ctx)
	if err != nil {
		return err
	}
	sent, err := x.world.sent(ctx)
	if err != nil {
		return err
	}
	x.say("weir's processes are stopped (SIGSTOP) for %s, under user-space hogs", x.stopped)
	if err := x.under(ctx, kinds[0], x.stopped, x.world.serve); err != nil {
		return err
	}
	after, err := x.world.downs(ctx)
	if err != nil {
		return err
	}
	total := 0.0
	for name, n := range after {
		if name != metricPeer5 { // reported, without a claim
			total += n - before[name]
		}
	}
	x.result.Set("user_space_stopped_false_downs", total)
	now, err := x.world.sent(ctx)
	if err != nil {
		return err
	}
	x.result.Set("user_space_stopped_probes_per_second", float64(now-sent)/x.stopped.Seconds())
	return x.waitUp(ctx)
}

// claims evaluates the promises of liveness.
func (x *experiment) claims() {
	for _, c := range []struct {
		kind                lab.Kind
		claim, metric, want string
	}{
		{lab.Correctness, "false downs at the probing end, probes every 10 ms", metricMaster, "== 0"},
		{lab.Correctness, "false downs at the probed end", metricPeer, "== 0"},
		{lab.Correctness, "false downs at the probing end, probes every 5 ms", metricMaster5, "== 0"},
		{lab.Correctness, "false downs at any end of BFD sessions, 10 ms with a multiplier of 3", metricBFD, "== 0"},
		{lab.Correctness, "false downs with weir's processes stopped", "user_space_stopped_false_downs", "== 0"},
		{lab.Correctness, "probes a second meanwhile, of 300 from two sessions", "user_space_stopped_probes_per_second", ">= 150"},
		{lab.Performance, "CPU time of an end of 200 sessions, probes every 10 ms, in percent of one CPU", "sessions_200_cpu_percent", "<= 5"},
	} {
		if x.rounds > 0 || c.kind == lab.Correctness {
			x.result.Claim(c.kind, c.claim, c.metric, c.want)
		}
	}
}
