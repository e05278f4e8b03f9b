// SPDX-License-Identifier: Apache-2.0

// Package reroutecost measures a router's cost of link protection: forwarding without protection, protected
// and up, and rerouted, compared with the kernel's own seg6. It also checks the format and the order of
// rerouted packets.
package reroutecost

import (
	"context"
	"errors"
	"time"

	"github.com/weir-project/weir/lab"
)

func init() {
	lab.Register(lab.Experiment{
		Name:  "reroute-cost",
		Short: "cost of protected links for a router, up and rerouted, compared with the kernel's encap seg6",
		Run:   run,
		Next: []string{
			"weir-lab run reroute-cost --quick --json   the findings for a program",
		},
	})
}

// plan holds the parameters of one size of the experiment.
type plan struct {
	packets int           // of every shape, each rerouted, caught and compared
	flips   int           // of a link under a stream
	rounds  int           // of measurements; 0: none
	burst   int           // packets in a lane's turn
	costFor time.Duration // limit
}

var plans = map[lab.Size]plan{
	lab.Full:  {packets: 200, flips: 5000, rounds: 1001, burst: 10_000, costFor: 2 * time.Minute},
	lab.Quick: {packets: 40, flips: 1200, rounds: 301, burst: 10_000, costFor: 25 * time.Second},
	lab.Smoke: {packets: 8, flips: 1000},
}

// experiment is one run.
type experiment struct {
	plan
	env    *lab.Env
	result *lab.Result
}

func run(ctx context.Context, e *lab.Env, r *lab.Result) error {
	if e.Control {
		return errors.New("reroute-cost has no control run: it already compares with the kernel's own forwarding")
	}
	x := &experiment{plan: plans[e.Size], env: e, result: r}
	if err := r.WithStalls(func() error { return x.measure(ctx) }); err != nil {
		return err
	}
	x.claims()
	return nil
}

func (x *experiment) say(format string, a ...any) { x.env.Watch.Log(format, a...) }

func (x *experiment) measure(ctx context.Context) error {
	parts := []func(context.Context) error{x.shapes, x.flip}
	if x.rounds > 0 {
		parts = append(parts, x.measureCost)
	}
	for _, part := range parts {
		if err := part(ctx); err != nil || ctx.Err() != nil {
			return errors.Join(err, ctx.Err())
		}
	}
	return nil
}

func (x *experiment) claims() {
	r := x.result
	if x.rounds > 0 {
		r.Claim(lab.Performance, "packets per CPU-second through a protected link in use, relative to an unprotected link", "up_ratio", ">= 0.95")
		r.Claim(lab.Performance, "rerouted packets per CPU-second, relative to an unprotected link", "reroute_ratio", ">= 0.85")
	}
	r.Claim(lab.Correctness, "malformed rerouted packets: checksum, lengths, routing header, inner bytes", "malformed", "== 0")
	r.Claim(lab.Correctness, "lost packets of a numbered stream while its link went down and up", "lost_in_flips", "== 0")
}
