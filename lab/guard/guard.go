// SPDX-License-Identifier: Apache-2.0

// Package guards tests the guard: with scenarios of attacks on a virtual clock, by its cost, on two CPUs at
// once, and on real sockets. It compares the guard with Cloudflare's published algorithm, Rakelimit.
package guards

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/guard/rakelimit"
)

func init() {
	lab.Register(lab.Experiment{
		Name:  "guard",
		Short: "floods of UDP in every pattern, compared with the algorithm of Cloudflare's Rakelimit",
		Run:   run,
		Next: []string{
			"weir-lab run guard --without-weir   the same claims for Rakelimit: most fail",
			"weir-lab run guard --quick --json   the findings for a program",
		},
	})
}

// plan holds the parameters of one size of the experiment.
type plan struct {
	hurry   bool     // attacks are shortened to the part with the same result
	only    []string // scenarios; nil: all
	seeds   int      // traces of each scenario
	compare bool     // run the scenarios for the other algorithm, too
	rounds  int      // rounds of cost measurements; 0: none
	races   int
	meter   bool          // measure nftables' meter, too
	warm    time.Duration // of clients alone on real sockets; 0: no claims about clients there
	flood   time.Duration // of real sockets
}

var plans = map[lab.Size]plan{
	lab.Full:  {seeds: 3, compare: true, rounds: 41, races: 5, meter: true, warm: 12 * time.Second, flood: 10 * time.Second},
	lab.Quick: {hurry: true, seeds: 2, compare: true, rounds: 15, races: 3, meter: true, warm: 9 * time.Second, flood: 4 * time.Second},
	lab.Smoke: {hurry: true, seeds: 1, races: 1, flood: 4 * time.Second},
}

// Bounds of the claims.
const (
	legitKept = 0.98
	overLimit = 1.12
	knownLost = 0.1
	coldKept  = 0.95
)

// experiment is one run.
type experiment struct {
	plan
	env    *lab.Env
	result *lab.Result
	ours   *side
	judged []*side
}

func run(ctx context.Context, e *lab.Env, r *lab.Result) error {
	if err := rakelimit.Need(); err != nil {
		r.Skip("%v", err)
		return err
	}
	x := &experiment{plan: plans[e.Size], env: e, result: r, ours: &weir}
	if e.Control {
		// The control run claims the same of the other algorithm. Its failures show the value of the
		// claims.
		x.ours = &side{limiter: theirs.limiter, attach: theirs.attach}
	}
	x.judged = []*side{x.ours}
	if x.compare {
		x.judged = append(x.judged, &theirs)
	}
	if err := r.WithStalls(func() error { return x.measure(ctx) }); err != nil {
		return err
	}
	x.claims()
	return nil
}

func (x *experiment) say(format string, a ...any) { x.env.Watch.Log(format, a...) }

// measure runs all parts. Sockets and scenarios run together: the kernel timestamps a socket's packets, and
// scenarios have their own clock, so neither depends on the load of the machine. Timed parts follow.
func (x *experiment) measure(ctx context.Context) error {
	both, cancel := context.WithCancel(ctx)
	defer cancel()
	sockets := make(chan error, 1)
	go func() {
		err := x.sockets(both)
		if err == nil && x.meter {
			err = x.meters(both)
		}
		if err != nil {
			cancel()
		}
		sockets <- err
	}()
	err := x.judge(both)
	if err != nil {
		cancel()
	}
	if err := errors.Join(<-sockets, err); err != nil {
		return err
	}
	if x.rounds > 0 {
		if err := x.measureCost(ctx); err != nil {
			return err
		}
	}
	return x.race(ctx)
}

// claims evaluates the guard's promises.
func (x *experiment) claims() {
	for _, c := range []struct {
		kind                lab.Kind
		claim, metric, want string
		smoke               bool
	}{
		{lab.Correctness, "number of scenarios", "scenarios", ">= 15", true},
		{lab.Correctness, "kept share of clients known before the attack and below the limit together, worst scenario",
			"legit_kept_min", fmt.Sprintf(">= %g", legitKept), true},
		{lab.Correctness, "accepted relative to the limit, worst second of the worst scenario", "accepted_over_limit_max", fmt.Sprintf("<= %g", overLimit), true},
		{lab.Correctness, "kept share of clients from the fifth second on, with a guard applied in the middle of a flood, worst scenario",
			"cold_start_kept_min", fmt.Sprintf(">= %g", coldKept), true},
		{lab.Correctness, "lost share of a single source known before a spoofed flood, worst of ten seeds",
			"known_source_lost_max", fmt.Sprintf("<= %g", knownLost), true},
		{lab.Correctness, "hosts, networks and ports in the guard's status at more than twice their rate of rejected packets",
			"status_false_names", "== 0", true},
		{lab.Correctness, "excess share accepted by two CPUs at one instant, compared with one CPU", "lost_update_ratio_2cpu", "<= 0.02", true},
		{lab.Correctness, "accepted relative to the limit on a real IPv6 socket, random payload", "ipv6_random_payload_accepted_ratio", "<= 1.05", true},
		{lab.Correctness, "accepted relative to the limit on a real IPv4 socket, random payload", "ipv4_random_payload_accepted_ratio", "<= 1.05", true},
		{lab.Performance, "kept share of clients arriving during a spoofed flood of 50,000 pps", "newcomers_kept_spoofed_50k", ">= 0.95", false},
		{lab.Performance, "cost of a passing packet, random sources, relative to the other algorithm", "ns_ratio_rakelimit", "<= 0.5", false},
		{lab.Performance, "kept share of clients on a real IPv6 socket", "ipv6_random_payload_legit_kept", fmt.Sprintf(">= %g", legitKept), false},
	} {
		if x.env.Size == lab.Smoke && !c.smoke {
			continue
		}
		x.result.Claim(c.kind, c.claim, c.metric, c.want)
	}
}
