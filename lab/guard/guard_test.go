// SPDX-License-Identifier: Apache-2.0

package guards

import (
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/guard/scenario"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/lab"
)

func TestMain(m *testing.M) {
	lab.Enter()
	nstest.Main(m)
}

// newExperiment returns a run; a test runs a part of it. Both sides are rakelimit: the tests are about the
// harness, and it must detect this algorithm's faults.
func newExperiment(t *testing.T, p plan) *experiment {
	t.Helper()
	nstest.NeedRoot(t)
	e, err := lab.NewEnv(lab.Smoke, 1)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		e.Close()
		if left := e.Leftovers(); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	})
	ours := &side{limiter: theirs.limiter, attach: theirs.attach}
	return &experiment{plan: p, env: e, result: lab.NewResult("guard", lab.Smoke, 1), ours: ours, judged: []*side{ours, &theirs}}
}

func between(t *testing.T, x *experiment, metric string, low, high float64) {
	t.Helper()
	if err := outside(x, metric, low, high); err != nil {
		t.Error(err)
	}
}

func outside(x *experiment, metric string, low, high float64) error {
	if v, ok := x.result.Metrics[metric]; !ok || v < low || v > high {
		return fmt.Errorf("%s is %v (set: %t), want %v to %v", metric, v, ok, low, high)
	}
	return nil
}

// A failing limiter has the metrics of its worst scenario and seed, and a note names them.
func TestJudgeFindsFailure(t *testing.T) {
	x := newExperiment(t, plan{hurry: true, seeds: 2, only: []string{"single_flow", "sources_2000x25", "cold_spoofed"}})
	if err := x.judge(t.Context()); err != nil {
		t.Fatal(err)
	}
	between(t, x, "scenarios", 3, 3)
	between(t, x, "legit_kept_single_flow", 0.98, 1)
	between(t, x, "legit_kept_min", 0, 0.06)
	between(t, x, "rakelimit_legit_kept_min", 0, 0.06)
	between(t, x, "accepted_over_limit_max", 1.3, 3)
	between(t, x, "newcomers_kept_cold_spoofed", 0, 0.06)
	if _, ok := x.result.Metrics["legit_kept_cold_spoofed"]; ok {
		t.Error("a kept share of known clients in the cold start, want none: no client was known")
	}
	if len(x.result.Notes) < 4 {
		t.Errorf("notes: %q", x.result.Notes)
	}
	if x.result.Metrics["legit_kept_sources_2000x25"] != x.result.Metrics["rakelimit_legit_kept_sources_2000x25"] {
		t.Error("the same algorithm with the same seed decided differently")
	}
}

func TestTally(t *testing.T) {
	x := &experiment{result: lab.NewResult("guard", lab.Smoke, 1), ours: &side{}}
	legit := scenario.Scenario{Name: "a", LegitCounts: true}
	fresh := scenario.Scenario{Name: "new_b"}
	v := func(s scenario.Scenario, kept, fresh, worst float64) verdict {
		return verdict{Scenario: s, Outcome: scenario.Outcome{LegitKept: kept, NewcomersKept: fresh, MinClient: kept / 2, AcceptedOverLimitWorstSecond: worst}, side: x.ours}
	}
	x.tally([]verdict{v(legit, 0.99, math.NaN(), 1.1), v(legit, 0.97, math.NaN(), 1), v(legit, 1, math.NaN(), 1.05),
		v(fresh, 0.1, 0.6, 1.2), v(fresh, 0.1, 0.5, 1)})
	want := map[string]float64{"legit_kept_a": 0.97, "legit_kept_min": 0.97, "client_kept_min": 0.485, "newcomers_kept_b": 0.5, "legit_kept_new_b": 0.1,
		"accepted_over_limit_a": 1.1, "accepted_over_limit_new_b": 1.2, "accepted_over_limit_max": 1.2}
	for metric, w := range want {
		if got, ok := x.result.Metrics[metric]; !ok || got != w {
			t.Errorf("%s is %v (%t), want %v", metric, got, ok, w)
		}
	}
	if len(x.result.Metrics) != len(want) {
		t.Errorf("metrics %v", x.result.Metrics)
	}
}

// A socket filter of this algorithm reads payload as addresses, and an IPv6 flood passes. The harness
// detects this, and the rest left to clients.
func TestSocketsFindBypass(t *testing.T) {
	nstest.NeedRoot(t)
	var x *experiment
	for stalled, try := true, 0; stalled && try < 30; try++ { // a stalled machine has no flood and no clients
		t.Run("", func(t *testing.T) {
			x = newExperiment(t, plan{warm: time.Second, flood: time.Second})
			if err := x.result.WithStalls(func() error { return x.sockets(t.Context()) }); err != nil {
				t.Fatal(err)
			}
		})
		stalled = x.result.Metrics["stall_ms_max"] > 250
	}
	between(t, x, "ipv6_random_payload_accepted_ratio", 10, 110)
	between(t, x, "ipv4_random_payload_accepted_ratio", 0.3, 30)
	between(t, x, "rakelimit_ipv6_random_payload_accepted_ratio", 10, 110)
	between(t, x, "ipv4_random_payload_flood_pps", 500, 11_000)
	between(t, x, "ipv4_random_payload_legit_kept", 0.5, 1.05)
}

// The same program costs the same, and more than nothing. The kernel counts a stall of the machine within a
// program as its cost, so a run with a stall proves nothing.
func TestCostOfTheSame(t *testing.T) {
	nstest.NeedRoot(t)
	for try := 1; ; try++ {
		var x *experiment
		t.Run("", func(t *testing.T) {
			x = newExperiment(t, plan{rounds: 9})
			if err := x.result.WithStalls(func() error { return x.measureCost(t.Context()) }); err != nil {
				t.Fatal(err)
			}
		})
		var wrong []error
		for _, k := range kinds {
			for _, way := range []string{"", "_loop"} {
				wrong = append(wrong, outside(x, "ns_ratio_rakelimit"+k.name+way, 0.5, 2), outside(x, "ns"+k.name+way, 20, 20_000),
					outside(x, "ns_empty"+k.name+way, 0.1, 5_000))
			}
		}
		err := errors.Join(wrong...)
		if err == nil || t.Failed() {
			return
		}
		if stall := x.result.Metrics["stall_ms_max"]; stall < 20 || try == 10 {
			t.Fatalf("%v\nlongest stall of the machine %.0f ms", err, stall)
		}
	}
}

// A limiter without a total has no updates to lose. This is no result, not a good one.
func TestRaceOfNoTotal(t *testing.T) {
	nstest.NeedRoot(t)
	x := newExperiment(t, plan{races: 1})
	if err := x.race(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, ok := x.result.Metrics["lost_update_ratio_2cpu"]; ok || len(x.result.Notes) != 1 {
		t.Errorf("%v, %q", x.result.Metrics, x.result.Notes)
	}
}

// losing is a limiter with given accounts.
type losing struct {
	limiter
	passed, spent uint64
}

func (l losing) Accounts(uint64) (uint64, uint64) { return l.passed, l.spent }

func TestLostUpdates(t *testing.T) {
	nstest.NeedRoot(t)
	x := newExperiment(t, plan{})
	for _, c := range []struct {
		passed, spent uint64
		want          float64
		fails         bool
	}{{500_000, 500_000, 0, false}, {500_000, 450_000, 0.1, false}, {500_000, 505_000, 0.01, false}, {1000, 1000, 0, true}} {
		l, err := x.ours.limiter(raceLimit, false, 1)
		if err != nil {
			t.Fatal(err)
		}
		got, err := lostShare(losing{l, c.passed, c.spent})
		l.Close()
		if (err != nil) != c.fails || err == nil && math.Abs(got-c.want) > 1e-9 {
			t.Errorf("%d passed, %d spent: %v, %v; want %v", c.passed, c.spent, got, err, c.want)
		}
	}
}
