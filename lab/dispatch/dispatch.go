// SPDX-License-Identifier: Apache-2.0

// Package dispatch compares weir's bindings with the same dispatch on a BPF_MAP_TYPE_LPM_TRIE, like
// tubular's, and with no steering. There are a million bindings, 65,536 services with a socket each, and
// real connections and datagrams. It measures the cost of a lookup, of a connection, and of a change. It
// also changes bindings and programs under clients: each client must meet the old or the new state.
package dispatch

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/rig"
)

func init() {
	lab.Register(lab.Experiment{
		Name:  "dispatch",
		Short: "a million bindings compared with the same dispatch on LPM_TRIE, and with no steering",
		Run:   run,
		Next: []string{
			"weir-lab run dispatch --quick --json    the findings for a program",
			"weir bind add --help                  how to bind a prefix to a service",
		},
	})
}

// plan holds the parameters of one size of the experiment.
type plan struct {
	bindings, services int
	sizes              []int         // numbers of bindings for timed lookups; none: no timing
	rounds, lookups    int           // random lookups, by each program and of each kind
	repeat             uint32        // lookups of one target
	compared           int           // targets for the comparison of chosen sockets
	ask                int           // bindings of the whole set queried over the network
	upgrades           int           // rounds of program replacements
	rooms              []int         // bindings added in a round, each time beyond the room
	swapped            int           // bindings of a set to replace under clients
	swapping           time.Duration // duration of these replacements
	trafficRounds      int
	roundTime          time.Duration // duration of a round
	replaces, binds    int           // commands with all bindings present
}

const maxBindings = 1 << 20

var plans = map[lab.Size]plan{
	lab.Full: {bindings: maxBindings, services: 1 << 16, sizes: []int{1, 1000, 100_000, maxBindings}, rounds: 21, lookups: 50_000, repeat: 1 << 18,
		compared: 100_000, ask: 4000, upgrades: 12, rooms: []int{5000, 20_000, 80_000, 300_000}, swapped: maxBindings, swapping: time.Minute,
		trafficRounds: 15, roundTime: 500 * time.Millisecond, replaces: 5, binds: 41},
	lab.Quick: {bindings: maxBindings, services: 1 << 16, sizes: []int{1, 1000, 100_000, maxBindings}, rounds: 7, lookups: 20_000, repeat: 1 << 15,
		compared: 20_000, ask: 800, upgrades: 3, rooms: []int{5000, 20_000}, swapped: 50_000, swapping: 5 * time.Second,
		trafficRounds: 9, roundTime: 220 * time.Millisecond, replaces: 3, binds: 15},
	lab.Smoke: {bindings: 1 << 16, services: 1 << 12, compared: 5000, ask: 400, upgrades: 2, rooms: []int{5000, 20_000},
		swapped: 8000, swapping: 2 * time.Second},
}

// experiment is one run.
type experiment struct {
	plan
	env    *lab.Env
	result *lab.Result
	weir   *rig.Weir
	trie   *trie
	few    *site // site for changes under clients
	many   *site // site with all services

	testRuns, interrupted int
	differ                int // targets with different choices of the two programs
	asked, wrong          int // queries over the network without the right answer
}

func run(ctx context.Context, e *lab.Env, r *lab.Result) error {
	if e.Control {
		return errors.New("dispatch has no control run: it already compares with no steering")
	}
	x := &experiment{plan: plans[e.Size], env: e, result: r}
	if err := r.WithStalls(func() error { return x.measure(ctx) }); err != nil {
		return err
	}
	r.Set("asked", float64(x.asked))
	r.Set("asked_wrong", float64(x.wrong))
	r.Set("chosen_compared", float64(x.compared))
	r.Set("chosen_otherwise", float64(x.differ))
	x.claims()
	return nil
}

func (x *experiment) say(format string, a ...any) { x.env.Watch.Log(format, a...) }

// rand returns a separate source for each part of the run, so the draws of one part do not depend on
// another.
func (x *experiment) rand(part ...any) *rand.Rand {
	h := uint64(14695981039346656037)
	for _, b := range []byte(fmt.Sprint(part...)) {
		h = (h ^ uint64(b)) * 1099511628211
	}
	return rand.New(rand.NewPCG(x.env.Seed, h))
}

func (x *experiment) measure(ctx context.Context) error {
	var err error
	if x.weir, err = rig.NewWeir(x.env, ""); err != nil {
		return err
	}
	if x.trie, err = openTrie(); errors.Is(err, ebpf.ErrNotSupported) {
		x.result.Skip("%v", err)
	}
	if err != nil {
		return err
	}
	defer x.trie.c.Close()
	if err := x.change(ctx); err != nil {
		return err
	}
	return x.million(ctx)
}

// claims evaluates the promises of bindings. Smaller runs leave out the claims about size.
func (x *experiment) claims() {
	for _, c := range []struct {
		kind                lab.Kind
		claim, metric, want string
		sized               bool
	}{
		{lab.Correctness, "replacement of whole sets: every client meets the old or the new set, and none is refused", "misdirected_during_replace", "== 0", false},
		{lab.Correctness, "replacement of programs, also by ones with larger maps: every client meets its binding", "misdirected_during_upgrade", "== 0", false},
		{lab.Correctness, "weir chooses the same socket as the program on LPM_TRIE", "chosen_otherwise", "== 0", false},
		{lab.Correctness, "the service bound to an address answers over the network", "asked_wrong", "== 0", false},
		{lab.Correctness, "bindings read back by weir", "bindings", "== 1048576", true},
		{lab.Correctness, "services with a live socket", "services", "== 65536", true},
		{lab.Performance, "speedup over LPM_TRIE, a random bound host among a million", "speedup_random_hit_1m", ">= 5", true},
		{lab.Performance, "speedup over LPM_TRIE, a random host without a binding", "speedup_random_miss_1m", ">= 5", true},
		{lab.Performance, "a lookup among a million bindings, relative to a single binding, of one service", "growth_1_to_1m", "<= 4", true},
		{lab.Performance, "a connection with a million bindings, relative to no steering", "overhead_connect_ratio", "<= 1.1", true},
		{lab.Performance, "seconds of weir bind replace with a million", "replace_1m_s", "<= 5", true},
		{lab.Performance, "ms of a whole weir bind add among a million", "bind_ms_p50_1m", "<= 50", true},
	} {
		if c.sized && x.env.Size == lab.Smoke {
			continue
		}
		x.result.Claim(c.kind, c.claim, c.metric, c.want)
	}
}

// median sorts a copy. For an even number it returns the mean of the middle two.
func median(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(v))
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

// medianRatio returns the median of the rounds' ratios.
func medianRatio(a, b []float64) float64 {
	var ratios []float64
	for i := range min(len(a), len(b)) {
		ratios = append(ratios, a[i]/b[i])
	}
	return median(ratios)
}
