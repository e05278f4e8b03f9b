// SPDX-License-Identifier: Apache-2.0

package guards

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"slices"
	"strings"
	"sync"

	"github.com/weir-project/weir/feature/guard/scenario"
)

// verdict is the result of one side in one scenario with one seed.
type verdict struct {
	scenario.Scenario
	scenario.Outcome
	side  *side
	seed  uint64
	false []string // wrong names in the guard's status, excluding its error bounds
}

// job is a scenario to run.
type job struct {
	scenario.Scenario
	side *side
	seed uint64
}

// scenarios returns the scenarios of the run's size.
func (x *experiment) scenarios() []scenario.Scenario {
	var all []scenario.Scenario
	for _, s := range scenario.All() {
		if x.hurry && s.Long || x.only != nil && !slices.Contains(x.only, s.Name) {
			continue
		}
		if x.hurry {
			s = s.Shortened()
		}
		all = append(all, s)
	}
	return all
}

// judge runs all scenarios through both sides, one on each CPU at a time. The clock belongs to the trace,
// so the result does not depend on the duration.
func (x *experiment) judge(ctx context.Context) error {
	var jobs []job
	scenes := x.scenarios()
	for _, s := range scenes {
		for i := range max(x.seeds, s.Seeds) {
			s := s
			s.IPv6 = s.IPv6 || i%2 == 1 // every second seed uses IPv6 in all scenarios
			for _, who := range x.judged {
				jobs = append(jobs, job{s, who, x.env.Seed + uint64(i)})
			}
		}
	}
	// The longest first, so none remains for a single CPU at the end.
	slices.SortStableFunc(jobs, func(a, b job) int { return int(b.To - b.From - (a.To - a.From)) })
	x.say("%d scenarios, %d seeds: BPF programs decide every packet on the trace's clock", len(scenes), x.seeds)
	todo := make(chan job)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	var mu sync.Mutex
	var verdicts []verdict
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for j := range todo {
				v, err := j.run(ctx)
				if err != nil {
					cancel(err)
				}
				mu.Lock()
				verdicts = append(verdicts, v)
				mu.Unlock()
			}
		})
	}
	for _, j := range jobs {
		select {
		case todo <- j:
			continue
		case <-ctx.Done():
		}
		break
	}
	close(todo)
	wg.Wait()
	if err := context.Cause(ctx); err != nil {
		return err
	}
	x.tally(verdicts)
	x.result.Set("scenarios", float64(len(scenes)))
	return nil
}

func (j job) run(ctx context.Context) (v verdict, err error) {
	v = verdict{Scenario: j.Scenario, side: j.side, seed: j.seed}
	l, err := j.side.limiter(j.Limit, j.IPv6, j.seed)
	if err != nil {
		return v, fmt.Errorf("%s%s: %w", j.side.name, j.Name, err)
	}
	defer l.Close()
	decides := scenario.Limiter(l)
	if p, ok := l.(product); ok {
		w := newWitness(p, j.Scenario, j.Trace(j.seed).Start())
		decides = w
		defer func() { v.false = w.false }()
	}
	v.Outcome, err = scenario.Run(j.Scenario, j.seed, interruptible{decides, ctx})
	return v, err
}

// interruptible is a limiter. It stops deciding after an interruption of the run.
type interruptible struct {
	scenario.Limiter
	ctx context.Context
}

func (l interruptible) Decide(packets []scenario.Packet, verdicts []bool) error {
	if err := l.ctx.Err(); err != nil {
		return err
	}
	return l.Limiter.Decide(packets, verdicts)
}

// tally sets the metrics: the worst seed of each scenario, and the worst scenario of each side.
func (x *experiment) tally(verdicts []verdict) {
	worst := worsts{}
	falseNames := 0
	for _, v := range verdicts {
		n := v.side.name
		falseNames += len(v.false)
		worst.least(n+"legit_kept_"+v.Name, v.LegitKept)
		if v.LegitCounts {
			worst.least(n+"legit_kept_min", v.LegitKept)
			worst.least(n+"client_kept_min", v.MinClient)
		}
		if v.ColdStart {
			worst.least(n+"cold_start_kept_min", v.NewcomersKept)
		}
		if v.KnownCounts {
			worst.keepMax(n+"known_source_lost_max", 1-v.MinClient)
		}
		worst.least(n+"newcomers_kept_"+strings.TrimPrefix(v.Name, "new_"), v.NewcomersKept)
		worst.keepMax(n+"accepted_over_limit_"+v.Name, v.AcceptedOverLimitWorstSecond)
		worst.keepMax(n+"accepted_over_limit_max", v.AcceptedOverLimitWorstSecond)
	}
	for metric, v := range worst {
		x.result.Set(metric, v)
	}
	if x.ours == &weir {
		x.result.Set("status_false_names", float64(falseNames))
	}
	x.explain(verdicts)
}

// worsts keeps the worst value of each metric. JSON has no NaN: an unmeasured value has no metric.
type worsts map[string]float64

func (w worsts) least(metric string, v float64)   { w.keep(metric, v, math.Min) }
func (w worsts) keepMax(metric string, v float64) { w.keep(metric, v, math.Max) }

func (w worsts) keep(metric string, v float64, of func(a, b float64) float64) {
	if math.IsNaN(v) {
		return
	}
	if had, ok := w[metric]; ok {
		v = of(had, v)
	}
	w[metric] = v
}

// explain notes the scenarios failing a claim.
func (x *experiment) explain(verdicts []verdict) {
	for _, v := range verdicts {
		if v.side != x.ours {
			continue
		}
		if v.LegitCounts && v.LegitKept < legitKept {
			x.result.Note("%s, seed %d, IPv6 %t: %.4f of clients' packets kept, %.3f for the worst client", v.Name, v.seed, v.IPv6, v.LegitKept, v.MinClient)
		}
		if v.ColdStart && v.NewcomersKept < coldKept {
			x.result.Note("%s, seed %d, IPv6 %t: %.4f of clients' packets kept from the fifth second on", v.Name, v.seed, v.IPv6, v.NewcomersKept)
		}
		if v.KnownCounts && 1-v.MinClient > knownLost {
			x.result.Note("%s, seed %d, IPv6 %t: the worst known source kept %.3f", v.Name, v.seed, v.IPv6, v.MinClient)
		}
		if len(v.false) > 0 {
			x.result.Note("%s, seed %d, IPv6 %t: status lists at twice their rate or more: %s", v.Name, v.seed, v.IPv6, strings.Join(v.false, "; "))
		}
		if v.AcceptedOverLimitWorstSecond > overLimit {
			x.result.Note("%s, seed %d, IPv6 %t: %.3f of the limit accepted in the worst second", v.Name, v.seed, v.IPv6, v.AcceptedOverLimitWorstSecond)
		}
	}
}
