// SPDX-License-Identifier: Apache-2.0

// Package tables compares the longest-prefix table of package table with BPF_MAP_TYPE_LPM_TRIE: the same
// prefixes, the same keys, one BPF object, one run. Both must find the same value for every key. The
// experiment measures lookups, and the cost of filling, changing and freeing.
package tables

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/table"
)

func init() {
	lab.Register(lab.Experiment{
		Name:  "table",
		Short: "longest-prefix lookups compared with BPF_MAP_TYPE_LPM_TRIE in the same program and run",
		Run:   run,
		Next: []string{
			"weir-lab run table --quick --json   the findings for a program",
			"go doc ./table                      how a program gets such a table",
		},
	})
}

// set is a number of prefixes and a choice of keys.
type set struct {
	prefixes int
	segments int // MiB of pages; a table of a million has room for changes
	dense    bool
	choices  []string
}

const (
	uniform = "uniform"
	zipf    = "zipf"
	million = 1_000_000
)

// name returns the suffix of a choice's metrics. The placement of prefixes matters only for 10,000.
func (s set) name(f family, choice string) string {
	size := map[int]string{10_000: "10k", 100_000: "100k", million: "1m"}[s.prefixes]
	if s.prefixes == 10_000 {
		choice = "sparse"
		if s.dense {
			choice = "dense"
		}
	}
	return fmt.Sprintf("%s_%s_%s", f, choice, size)
}

// plan holds the parameters of one size of the experiment.
type plan struct {
	sets        []set
	keys        int // compared keys of each set, at most keyCount
	flipped     int // compared keys with flipped bits, and after changes
	rounds      int // of lookups, by each way; 0: no timing
	independent int // rounds with independent lookups
	lookups     int // in a round
	builds      int // number of loads and frees of a million
	changes     int // to a loaded million
	flips       int // while BPF reads, both families together
}

var (
	ten     = set{10_000, 4, false, []string{uniform}}
	tenRow  = set{10_000, 4, true, []string{uniform}}
	hundred = set{100_000, 8, false, []string{uniform}}
	all     = set{million, 14, false, []string{uniform, zipf}}
)

var plans = map[lab.Size]plan{
	lab.Full: {sets: []set{ten, tenRow, {100_000, 8, false, []string{uniform, zipf}}, all}, keys: keyCount, flipped: keyCount,
		rounds: 15, independent: 7, lookups: 1 << 18, builds: 3, changes: 120_000, flips: 1_000_000},
	lab.Quick: {sets: []set{ten, tenRow, hundred, all}, keys: keyCount, flipped: keyCount / 4,
		rounds: 5, independent: 3, lookups: 1 << 17, builds: 1, changes: 12_000, flips: 100_000},
	lab.Smoke: {sets: []set{ten, tenRow}, keys: keyCount / 4, flipped: keyCount / 4, flips: 10_000},
}

// experiment is one run.
type experiment struct {
	plan
	env    *lab.Env
	result *lab.Result

	compared int // keys looked up in both
	missed   int // keys without a prefix
	unequal  int // keys with different results of the table in BPF, the table in Go, or LPM_TRIE

	speedup10k []float64
	building   map[family][]timing
	changing   map[family]timing
	freeing    timing
	unmeasured bool // no measurement of freeing
	torn       torn
}

// timing holds the durations of the same work by both ways.
type timing struct{ table, trie float64 }

func (t timing) ratio() float64 { return t.table / t.trie }

func run(ctx context.Context, e *lab.Env, r *lab.Result) error {
	if e.Control {
		return errors.New("table has no control run: it already compares with LPM_TRIE")
	}
	if err := needLoop(); err != nil {
		r.Skip("%v", err)
		return err
	}
	x := &experiment{plan: plans[e.Size], env: e, result: r, building: map[family][]timing{}, changing: map[family]timing{}}
	if err := r.WithStalls(func() error { return x.measure(ctx) }); err != nil {
		return err
	}
	x.finish()
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

// measure runs all parts: changes under readers first, because no other part would detect their faults.
func (x *experiment) measure(ctx context.Context) error {
	for _, f := range []family{v4, v6} {
		if err := x.tear(ctx, f); err != nil {
			return fmt.Errorf("%s: %w", f, err)
		}
	}
	for _, s := range x.sets {
		for i, f := range []family{v4, v6} {
			if err := x.measureSet(ctx, f, s, i == 0); err != nil {
				return fmt.Errorf("%d prefixes of %s: %w", s.prefixes, f, err)
			}
		}
	}
	return nil
}

// measureSet measures one set from load to free; a million as often as the plan requires.
func (x *experiment) measureSet(ctx context.Context, f family, s set, tableFirst bool) error {
	r := x.rand(f, s.prefixes, s.dense)
	var entries, more []table.Entry
	if s.dense {
		entries = dense(f, s.prefixes, r)
	} else {
		entries = sparse(f, s.prefixes+x.changes, r)
		entries, more = entries[:s.prefixes], entries[s.prefixes:]
	}
	for turn := range max(1, x.builds) {
		if turn > 0 && s.prefixes < million {
			break
		}
		if err := x.life(ctx, f, s, entries, more, turn, tableFirst == (turn%2 == 0)); err != nil {
			return err
		}
	}
	return nil
}

// life is one turn of a set; only turn 0 looks keys up. first reports whether the table is filled and freed
// first.
func (x *experiment) life(ctx context.Context, f family, s set, entries, more []table.Entry, turn int, first bool) error {
	b, err := load(f, s.prefixes+len(more), s.segments)
	if err != nil {
		return err
	}
	defer b.close()
	x.say("%s: loading %d prefixes into a table and an LPM_TRIE", f, s.prefixes)
	built, err := b.build(entries, first)
	if err != nil {
		return err
	}
	if turn == 0 {
		if err := x.ask(ctx, b, s, entries); err != nil {
			return err
		}
	}
	if s.prefixes < million || ctx.Err() != nil {
		return ctx.Err()
	}
	x.building[f] = append(x.building[f], built)
	if turn == 0 {
		if err := x.change(ctx, b, entries, more); err != nil {
			return err
		}
	}
	return x.free(ctx, b, first)
}

// finish sets the metrics over several sets.
func (x *experiment) finish() {
	r := x.result
	r.Set("keys_compared", float64(x.compared))
	r.Set("keys_uncovered", float64(x.missed))
	r.Set("checksum_equal", 0)
	if x.unequal == 0 && x.compared > 0 {
		r.Set("checksum_equal", 1)
	}
	x.torn.report(r)
	if x.rounds == 0 {
		return
	}
	r.Set("speedup_min_10k", slices.Min(x.speedup10k))
	for f, turns := range x.building {
		var ratios []float64
		for _, t := range turns {
			ratios = append(ratios, t.ratio())
		}
		x.worst("build_ratio_1m", median(ratios), "build_s", turns[0])
		r.Set(fmt.Sprintf("build_ratio_%s_1m", f), median(ratios))
	}
	for f, t := range x.changing {
		x.worst("update_ratio", t.ratio(), "update_us", t)
		r.Set(fmt.Sprintf("update_ratio_%s", f), t.ratio())
	}
	r.Set("free_ms_table", x.freeing.table)
	r.Set("free_ms_trie", x.freeing.trie)
	if x.freeing.trie > 0 {
		r.Set("free_ratio", max(0, x.freeing.ratio()))
	}
}

// worst sets a ratio and its times, unless another family's is larger.
func (x *experiment) worst(metric string, ratio float64, times string, t timing) {
	if had, ok := x.result.Metrics[metric]; ok && had >= ratio {
		return
	}
	x.result.Set(metric, ratio)
	x.result.Set(times+"_table", t.table)
	x.result.Set(times+"_trie", t.trie)
}

// claims evaluates the table's promises.
func (x *experiment) claims() {
	for _, c := range []struct {
		kind                lab.Kind
		claim, metric, want string
	}{
		{lab.Correctness, "for every key the table finds the same as LPM_TRIE, in BPF and in Go", "checksum_equal", "== 1"},
		{lab.Correctness, "a lookup during an update finds the old or the new value", "torn_reads", "== 0"},
		{lab.Performance, "speedup over LPM_TRIE, a million IPv4 prefixes, uniform", "speedup_v4_uniform_1m", ">= 12"},
		{lab.Performance, "speedup over LPM_TRIE, a million IPv4 prefixes, zipf", "speedup_v4_zipf_1m", ">= 11"},
		{lab.Performance, "speedup over LPM_TRIE, a million IPv6 prefixes, uniform", "speedup_v6_uniform_1m", ">= 10"},
		{lab.Performance, "speedup over LPM_TRIE, a million IPv6 prefixes, zipf", "speedup_v6_zipf_1m", ">= 7.5"},
		{lab.Performance, "speedup over LPM_TRIE, 10,000 prefixes, the least of all sets", "speedup_min_10k", ">= 3"},
		{lab.Performance, "filling with a million unsorted prefixes, relative to LPM_TRIE's batch", "build_ratio_1m", "<= 0.3"},
		{lab.Performance, "a change to a million prefixes, relative to LPM_TRIE's system call", "update_ratio", "<= 1"},
		{lab.Performance, "kernel CPU time of freeing a million prefixes, relative to LPM_TRIE", "free_ratio", "<= 0.05"},
		{lab.Performance, "MB of a table for a million IPv4 prefixes", "memory_mb_v4_1m", "<= 24"},
		{lab.Performance, "MB of a table for a million IPv6 prefixes", "memory_mb_v6_1m", "<= 24"},
	} {
		if c.kind == lab.Performance && x.env.Size == lab.Smoke {
			continue
		}
		if c.metric == "free_ratio" && x.unmeasured {
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
