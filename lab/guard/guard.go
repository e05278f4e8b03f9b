// SPDX-License-Identifier: Apache-2.0

// Package guards judges the guard: by scenarios of attacks on a virtual clock, by what it costs, by two CPUs at once, and
// on real sockets; beside the algorithm that Cloudflare published as Rakelimit.
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
		Short: "floods of UDP in every pattern, beside the algorithm of Cloudflare's Rakelimit",
		Run:   run,
		Next: []string{
			"weir-lab run guard --without-weir   the same claims made of Rakelimit: most fail",
			"weir-lab run guard --quick --json   the findings for a program",
		},
	})
}

// plan is what one size of the experiment does.
type plan struct {
	hurry   bool     // attacks are cut to what tells the same
	only    []string // scenarios; nil: all
	seeds   int      // traces of each scenario
	compare bool     // the other algorithm gets the scenarios, too
	rounds  int      // of measuring what a packet costs; 0: not at all
	races   int
	meter   bool          // nftables' meter is measured, too
	warm    time.Duration // of clients alone on real sockets; 0: nothing is said of clients there
	flood   time.Duration // of real sockets
}

var plans = map[lab.Size]plan{
	lab.Full:  {seeds: 3, compare: true, rounds: 41, races: 5, meter: true, warm: 12 * time.Second, flood: 10 * time.Second},
	lab.Quick: {hurry: true, seeds: 2, compare: true, rounds: 15, races: 3, meter: true, warm: 9 * time.Second, flood: 4 * time.Second},
	lab.Smoke: {hurry: true, seeds: 1, races: 1, flood: 4 * time.Second},
}

// What is claimed.
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
		// The claims are then made of the other one: what they are worth shows in that it does not keep them.
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

// measure does all of it. Sockets and scenarios go together: the kernel stamps what comes to a socket, and scenarios
// have a clock of their own, so neither depends on how busy the machine is. What takes times comes after.
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

// claims are what the guard promises.
func (x *experiment) claims() {
	for _, c := range []struct {
		kind                lab.Kind
		claim, metric, want string
		smoke               bool
	}{
		{lab.Correctness, "so many scenarios", "scenarios", ">= 15", true},
		{lab.Correctness, "of clients that were there before the attack, and are below the limit together, the share kept in the worst scenario",
			"legit_kept_min", fmt.Sprintf(">= %g", legitKept), true},
		{lab.Correctness, "accepted in the worst second of the worst scenario, over the limit", "accepted_over_limit_max", fmt.Sprintf("<= %g", overLimit), true},
		{lab.Correctness, "of clients of a guard that is applied in the middle of a flood, the share kept from the fifth second on, in the worst scenario",
			"cold_start_kept_min", fmt.Sprintf(">= %g", coldKept), true},
		{lab.Correctness, "of the packets of a single source that was known before a spoofed flood, the share lost, of the worst in ten seeds",
			"known_source_lost_max", fmt.Sprintf("<= %g", knownLost), true},
		{lab.Correctness, "hosts, networks and ports that the guard's status names at more than twice the rate at which they are refused",
			"status_false_names", "== 0", true},
		{lab.Correctness, "of what two CPUs accept at one instant, the share that one would not", "lost_update_ratio_2cpu", "<= 0.02", true},
		{lab.Correctness, "accepted over the limit on a real IPv6 socket, random payload", "ipv6_random_payload_accepted_ratio", "<= 1.05", true},
		{lab.Correctness, "accepted over the limit on a real IPv4 socket, random payload", "ipv4_random_payload_accepted_ratio", "<= 1.05", true},
		{lab.Performance, "of clients that come while 50,000 pps are spoofed, the share kept", "newcomers_kept_spoofed_50k", ">= 0.95", false},
		{lab.Performance, "what a packet costs that passes, random sources, over the other algorithm's", "ns_ratio_rakelimit", "<= 0.5", false},
		{lab.Performance, "of clients on a real IPv6 socket, the share kept", "ipv6_random_payload_legit_kept", fmt.Sprintf(">= %g", legitKept), false},
	} {
		if x.env.Size == lab.Smoke && !c.smoke {
			continue
		}
		x.result.Claim(c.kind, c.claim, c.metric, c.want)
	}
}
